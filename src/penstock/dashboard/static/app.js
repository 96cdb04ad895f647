// SPDX-License-Identifier: Apache-2.0
// The frame: which run, which view, the keys, the light. Text of runs is only ever put into text nodes.
import { render } from "preact";
import { useEffect, useState } from "preact/hooks";
import { address, follow, get, go, html, readAddress, takeToken } from "./lib.js";
import { Overview } from "./overview.js";
import { Trajectories, Trajectory, Group } from "./trajectories.js";
import { Flow, Stalls } from "./flow.js";
import { Fleet } from "./fleet.js";
import { Lineage, Rules, Spend, Weights } from "./ledger.js";

const VIEWS = [
  ["overview", "Overview", Overview], ["trajectories", "Trajectories", Trajectories], ["flow", "Flow", Flow],
  ["lineage", "Lineage", Lineage], ["fleet", "Fleet", Fleet], ["rules", "Data rules", Rules],
  ["weights", "Weights", Weights], ["spend", "Spend", Spend], ["stalls", "Stalls", Stalls],
];
const HIDDEN = { trajectory: Trajectory, group: Group };
const KEYS = [["1 … 9", "a view"], ["[ ]", "the run before or after"], ["/", "search"], ["j k", "down and up a list"], ["Enter", "open"], ["t", "light or dark"], ["?", "this list"]];

const theme = () => document.documentElement.dataset.theme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
function setTheme(name) {
  document.documentElement.dataset.theme = name;
  localStorage.setItem("penstock-theme", name);
  document.dispatchEvent(new Event("theme"));
}

function App() {
  const [at, setAt] = useState(readAddress());
  const [runs, setRuns] = useState(null);
  const [error, setError] = useState("");
  const [lost, setLost] = useState("");
  const [hasHelp, setHelp] = useState(false);
  useEffect(() => {
    const stop = new AbortController();
    const moved = () => { takeToken(); setAt(readAddress()); document.querySelector("main")?.focus({ preventScroll: true }); };
    addEventListener("hashchange", moved, { signal: stop.signal });
    get("/api/runs").then((found) => { setRuns(found); follow((state) => { setRuns(state); setLost(""); }, (wait) => setLost(wait == null ? "The dashboard has ended; this is its last state" : `Connection lost; asking again in ${wait} s`), stop.signal); })
      .catch((problem) => setError(problem.message));
    return () => stop.abort();
  }, []);
  const run = runs?.find((one) => one.key === at.run) || runs?.[0];
  useEffect(() => {
    const pressed = (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey) return;
      if (/^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName)) { if (event.key === "Escape") event.target.blur(); return; }
      const number = Number(event.key);
      if (run && number >= 1 && number <= VIEWS.length) go(run.key, VIEWS[number - 1][0]);
      else if (run && (event.key === "[" || event.key === "]")) {
        const next = runs.indexOf(run) + (event.key === "]" ? 1 : -1);
        go(runs[(next + runs.length) % runs.length].key, at.view, "");
      } else if (event.key === "/") { event.preventDefault(); document.querySelector("input[type=search]")?.focus(); }
      else if (event.key === "t") setTheme(theme() === "dark" ? "light" : "dark");
      else if (event.key === "?") setHelp((shown) => !shown);
      else if (event.key === "Escape") setHelp(false);
      else document.dispatchEvent(new CustomEvent("list-key", { detail: event.key }));
    };
    addEventListener("keydown", pressed);
    return () => removeEventListener("keydown", pressed);
  });
  const View = HIDDEN[at.view] || VIEWS.find(([name]) => name === at.view)?.[2] || Overview;
  const top = { trajectory: "trajectories", group: "trajectories" }[at.view] || at.view;
  useEffect(() => { document.querySelector("nav.side [aria-current]")?.scrollIntoView({ block: "nearest", inline: "center" }); }, [top, !runs]);
  useEffect(() => { document.title = run ? `${run.name} · ${top} · penstock` : "penstock"; });
  return html`<header class="bar"><a class="brand" href=${address(run?.key || "", "overview")}>penstock</a>
      ${runs && html`<label class="sr" for="run">Run</label><select id="run" value=${run.key} onChange=${(event) => go(event.target.value, top)}>${runs.map((one) => html`<option value=${one.key}>${one.key}</option>`)}</select>
        <span class="state"><i class="dot ${run.state}"></i>${run.state}<span class="quiet wide">${run.policies.map((one) => `step ${one.step} of ${one.steps}`).slice(0, 1)}</span></span>`}
      <span class="grow"></span>
      <button aria-label="Light or dark" title="Light or dark (t)" onClick=${() => setTheme(theme() === "dark" ? "light" : "dark")}>◐</button>
      <button class="wide" aria-label="Keys" title="Keys (?)" onClick=${() => setHelp(true)}>?</button></header>
    ${lost && html`<p class="lost" role="status">${lost} <button onClick=${() => document.dispatchEvent(new Event("retry"))}>Ask now</button></p>`}
    <div class="shell">${run && html`<nav class="side" aria-label="Views">${VIEWS.map(([name, label], i) => html`<a href=${address(run.key, name)} aria-current=${name === top ? "page" : undefined}>${label}<kbd>${i + 1}</kbd></a>`)}</nav>`}
    <main tabindex="-1">${error ? html`<p class="error" role="alert">${error}</p>` : !runs ? html`<p class="quiet">Reading the runs …</p>`
      : html`<${View} key=${at.view + run.key + at.id} run=${run} runs=${runs} id=${at.id} query=${at.query} />`}</main></div>
    ${hasHelp && html`<div class="help" role="dialog" aria-label="Keys" onClick=${() => setHelp(false)}><div class="panel"><h1>Keys</h1><table><tbody>${KEYS.map(([key, text]) => html`<tr><td><kbd>${key}</kbd></td><td>${text}</td></tr>`)}</tbody></table></div></div>`}`;
}

const kept = localStorage.getItem("penstock-theme");
if (kept) document.documentElement.dataset.theme = kept;
takeToken();
const place = document.getElementById("app");
place.textContent = "";
render(html`<${App} />`, place);
