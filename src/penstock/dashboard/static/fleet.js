// SPDX-License-Identifier: Apache-2.0
// What nodes and trainers did with their time.
import { useState } from "preact/hooks";
import { Parts } from "./charts.js";
import { Shown, activityColour, clock, count, css, duration, html, percent, useDrawing, useGet } from "./lib.js";

const PARTS = { wait: "var(--line)", read: "var(--s5)", train: "var(--s0)", publish: "var(--s2)", checkpoint: "var(--s1)" };
const resolve = (name) => css(name.slice(4, -1));

function Lane({ label, paint, title }) {
  const place = useDrawing((canvas, width) => {
    const scale = devicePixelRatio || 1;
    canvas.width = width * scale; canvas.height = 22 * scale;
    const context = canvas.getContext("2d");
    context.scale(scale, scale);
    paint(context, width, 22);
  }, [paint]);
  return html`<div class="lane"><span title=${label}>${label}</span><canvas ref=${place} role="img" aria-label=${title}></canvas></div>`;
}

export function Fleet({ run }) {
  const [before, setBefore] = useState("");
  const state = useGet(`/api/runs/${encodeURIComponent(run.key)}/timeline${before ? `?before=${before}` : ""}`, before ? "" : run.policies.map((one) => one.step).join());
  return html`<h1>Fleet</h1><${Shown} of=${state}>${(found) => found.end ? html`<${Lanes} found=${found} />
    <div class="tools">${before && html`<button class="more" onClick=${() => setBefore("")}>Newest</button>`}${found.next > 0 && html`<button class="more" onClick=${() => setBefore(found.next)}>Earlier</button>`}</div>
    <${Accounts} found=${found} />` : html`<p class="quiet">No attempt has been delivered yet.</p>`}<//>`;
}

function Lanes({ found }) {
  const span = found.end - found.start || 1;
  const most = Math.max(1e-6, ...found.nodes.flatMap((one) => one.busy));
  const x = (at, width) => width * (at - found.start) / span;
  return html`<p class="soft">${clock(found.start)} to ${clock(found.end)}, ${duration(span)}</p>
    <section class="panel"><h2>Rollout nodes: attempts at a time, up to ${count(most)}</h2>${found.nodes.map((one) => html`<${Lane} key=${one.node} label=${one.node} title=${`${one.node}: ${one.failed.length} failed attempts`} paint=${(context, width, height) => {
      context.fillStyle = resolve("var(--s0)");
      one.busy.forEach((busy, i) => { const tall = height * busy / most; context.fillRect(width * i / one.busy.length, height - tall, Math.ceil(width / one.busy.length), tall); });
      context.fillStyle = resolve("var(--bad)");
      one.failed.forEach((at) => context.fillRect(x(at, width) - 1, 0, 2, 6));
    }} />`)}<div class="legend"><span><i style=${{ background: "var(--s0)" }}></i>busy slots</span><span><i style=${{ background: "var(--bad)" }}></i>failed attempt</span></div></section>
    <section class="panel"><h2>Trainers</h2>${found.trainers.map((lane) => html`<${Lane} key=${lane.policy} label=${lane.policy} title=${`trainer of ${lane.policy}: ${lane.pieces.length} pieces of work`} paint=${(context, width, height) => {
      for (const piece of lane.pieces) { context.fillStyle = resolve(PARTS[piece.part]); const from = x(Math.max(found.start, piece.start), width); context.fillRect(from, 3, Math.max(0.6, x(piece.end, width) - from), height - 6); }
      context.fillStyle = resolve("var(--bad)");
      found.restarts.filter((one) => one.policy === lane.policy).forEach((one) => context.fillRect(x(one.at, width) - 1, 0, 2, height));
    }} />`)}<div class="legend">${Object.entries(PARTS).map(([part, tone]) => html`<span><i style=${{ background: tone }}></i>${part}</span>`)}<span><i style=${{ background: "var(--bad)" }}></i>trainer started</span><span>${count(found.versions.length)} versions published</span></div></section>`;
}

function Accounts({ found }) {
  if (!found.accounts.length) return null;
  return html`<section class="panel scroll"><h2>Time of each node since it joined</h2><table><thead><tr><th>node</th><th>now</th><th class="bars"></th><th class="num">rolling out</th><th class="num">loading</th><th class="num">waiting</th><th class="num">total</th></tr></thead><tbody>${found.accounts.map((node) => html`<tr><td class="nowrap">${node.node_id}</td><td><span class="chip ${node.status === "healthy" ? "good" : "warn"}">${node.status}</span> <span class="soft">${node.activity}</span></td><td><${Parts} whole=${node.time.total_s} write=${duration} parts=${Object.entries(node.time.seconds).map(([name, value]) => ({ label: name, value, colour: activityColour(name) }))} /></td>${["rolling_out", "loading", "waiting"].map((name) => html`<td class="num">${percent(node.time.shares[name])}</td>`)}<td class="num">${duration(node.time.total_s)}</td></tr>`)}</tbody></table><div class="legend">${[...new Set(found.accounts.flatMap((node) => Object.keys(node.time.seconds)))].map((name) => html`<span><i style=${{ background: activityColour(name) }}></i>${name.replace("_", " ")}</span>`)}</div></section>`;
}
