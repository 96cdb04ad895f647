// SPDX-License-Identifier: Apache-2.0
// What every view needs: the API with its token, addresses, and how numbers are written.
import { h } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";
import htm from "htm";

export const html = htm.bind(h);
const KEY = "penstock-token";

/** Take the token out of the address, where it must not stay, and keep it for this origin. */
export function takeToken() {
  const found = /^#token=([\w.~-]+)$/.exec(location.hash);
  if (!found) return;
  localStorage.setItem(KEY, found[1]);
  history.replaceState(null, "", location.pathname + "#/");
}

const headers = () => ({ authorization: `Bearer ${localStorage.getItem(KEY) || ""}` });

let isGone = false; // the dashboard said that it ends: asking it would only fill the console
const GONE = "The dashboard does not answer. If it has ended, start it again: penstock dashboard RUN";

export async function get(path, signal) {
  if (isGone) throw new Error(GONE);
  const answer = await fetch(path, { headers: headers(), signal }).catch((error) => { throw signal?.aborted ? error : new Error(GONE); });
  const body = await answer.json().catch(() => null);
  if (answer.ok) return body;
  const text = body?.error?.message || `HTTP ${answer.status}`;
  throw new Error(answer.status === 401
    ? "This page has no valid token. Open the address that `penstock dashboard` printed last." : text);
}

/** Server-sent events, read with fetch because EventSource sends no token. `onLost` gets the seconds until it asks
    again, each time twice as many, or null if the dashboard said that it ends; the event `retry` asks at once. */
export async function follow(onState, onLost, signal) {
  let wait = 1;
  while (!signal.aborted) {
    let isEnded = isGone = false;
    try {
      const answer = await fetch("/api/events", { headers: headers(), signal });
      isEnded = answer.status === 401; // another dashboard listens here now
      if (!answer.ok) throw new Error(`HTTP ${answer.status}`);
      const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
      let text = "";
      for (;;) {
        const { value, done } = await reader.read();
        if (done) break;
        text += value;
        const events = text.split("\n\n");
        text = events.pop();
        const data = events.filter((one) => one.startsWith("data: ")).pop();
        isEnded = isGone ||= events.some((one) => one.startsWith("event: end"));
        if (data) { wait = 1; onState(JSON.parse(data.slice(6))); }
      }
    } catch (error) {
      if (signal.aborted) return;
    }
    wait = Math.min(60, 2 * wait);
    onLost(isEnded ? null : wait);
    await new Promise((wake) => {
      document.addEventListener("retry", wake, { once: true });
      if (!isEnded) setTimeout(wake, 1000 * wait);
    });
  }
}

/** What is shown of it already, if the dashboard has ended: better than nothing. */
export const keep = (known, path) => isGone && known.data && known.path === path ? known : null;

/** What an address of the API answers; read again when `mark` changes. */
export function useGet(path, mark) {
  const [state, set] = useState({ path: null, data: null, error: null });
  useEffect(() => {
    if (!path) return;
    const stop = new AbortController();
    get(path, stop.signal).then((data) => set({ path, data, error: null }))
      .catch((error) => stop.signal.aborted || set((known) => keep(known, path) || { path, data: null, error: error.message }));
    return () => stop.abort();
  }, [path, mark]);
  return state.path === path ? state : { path, data: null, error: null };
}

// --- addresses: #/RUN/VIEW/ID?query
export function readAddress() {
  const [path, query] = location.hash.replace(/^#\/?/, "").split("?");
  const [run, view, ...rest] = path.split("/").map(decodeURIComponent);
  return { run: run || "", view: view || "overview", id: rest.join("/"), query: new URLSearchParams(query || "") };
}
export function address(run, view, id = "", query = {}) {
  const kept = Object.entries(query).filter(([, value]) => value !== "" && value != null);
  const tail = kept.length ? "?" + new URLSearchParams(kept) : "";
  return "#/" + [run, view, id].filter((part) => part !== "").map(encodeURIComponent).join("/") + tail;
}
export const go = (...parts) => { location.hash = address(...parts); };

// --- numbers and times
export const DASH = "–";
export const count = (value) => value == null ? DASH : Math.round(value).toLocaleString("en");
export function short(value) {
  if (value == null) return DASH;
  for (const [unit, size] of [["T", 1e12], ["G", 1e9], ["M", 1e6], ["k", 1e4]]) {
    if (Math.abs(value) >= size) return (value / (unit === "k" ? 1e3 : size)).toFixed(1) + unit;
  }
  return count(value);
}
export function figure(value) {
  if (value == null) return DASH;
  const size = Math.abs(value);
  if (size >= 1000) return short(value);
  if (size !== 0 && size < 1e-3) return value.toExponential(1);
  return value.toFixed(size >= 100 ? 0 : size >= 10 ? 1 : 3);
}
export const percent = (value) => value == null ? DASH : `${(100 * value).toFixed(value > 0 && value < 0.1 || value > 0.99 && value < 1 ? 1 : 0)} %`;
export function duration(seconds) {
  if (seconds == null) return DASH;
  if (seconds < 10) return `${seconds.toFixed(1)} s`;
  if (seconds < 120) return `${Math.round(seconds)} s`;
  if (seconds < 7200) return `${Math.round(seconds / 60)} min`;
  return seconds < 172800 ? `${(seconds / 3600).toFixed(1)} h` : `${(seconds / 86400).toFixed(1)} d`;
}
export function bytes(value) {
  if (value == null) return DASH;
  for (const [unit, size] of [["GB", 1e9], ["MB", 1e6], ["kB", 1e3]]) if (value >= size) return `${(value / size).toFixed(1)} ${unit}`;
  return `${value} B`;
}
export const moment = (at) => at ? new Date(at * 1000).toLocaleString("sv") : DASH;
export const clock = (at) => at ? new Date(at * 1000).toLocaleTimeString("sv") : DASH;

export const colour = (index) => `var(--s${index % 6})`;
/** The same colour for an activity in every view. */
const ACTIVITIES = { rolling_out: 0, training: 0, loading: 5, publishing: 5, starting: 3, evaluating: 2, other: 2, draining: 1, offline: 4 };
export const activityColour = (name) => name in ACTIVITIES ? colour(ACTIVITIES[name]) : "var(--line)";
export const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

export function Shown({ of: state, children }) {
  if (state.error) return html`<p class="error" role="alert">${state.error}</p>`;
  return state.data ? children(state.data) : html`<p class="quiet">Reading …</p>`;
}

/** Calls `draw(element, width)` now, and when width, theme or data change. */
export function useDrawing(draw, marks) {
  const place = useRef(null);
  useEffect(() => {
    const element = place.current;
    let done;
    const again = () => { done?.(); done = draw(element, element.clientWidth); };
    const seen = new ResizeObserver(() => element.clientWidth && again());
    seen.observe(element);
    document.addEventListener("theme", again);
    return () => { seen.disconnect(); document.removeEventListener("theme", again); done?.(); };
  }, marks);
  return place;
}
