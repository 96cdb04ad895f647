// SPDX-License-Identifier: Apache-2.0
// The way of the data from sources to weights, with what waits at each place; and who waits for whom.
import { useRef } from "preact/hooks";
import { DASH, Shown, count, duration, figure, html, percent, short, useGet } from "./lib.js";

const sum = (list, read) => list.reduce((all, one) => all + (read(one) || 0), 0);

/** Counts per second, from one answer to a later one. */
function useRates(counts) {
  const seen = useRef([]);
  const now = performance.now() / 1000;
  const list = seen.current;
  if (!list.length || now - list.at(-1).now > 0.5) list.push({ now, counts });
  while (list.length > 2 && list[1].now < now - 20) list.shift();
  const [first, last] = [list[0], list.at(-1)];
  return (name) => last.now - first.now < 1.5 ? null : (last.counts[name] - first.counts[name]) / (last.now - first.now);
}

export function Flow({ run }) {
  const state = useGet(`/api/runs/${encodeURIComponent(run.key)}/flow`, run.at);
  return html`<h1>Flow</h1><${Shown} of=${state}>${(found) => html`<${Picture} found=${found} />`}<//>`;
}

function Picture({ found }) {
  const live = found.nodes.filter((node) => node.state === "live");
  const slots = sum(found.nodes, (node) => node.capacity), leases = sum(found.nodes, (node) => node.num_leases);
  const issued = sum(found.sources, (one) => one.issued), step = sum(found.steps, (one) => one.step);
  const produced = sum(Object.values(found.totals), (one) => one.produced.tokens);
  const lost = sum(Object.values(found.totals), (one) => sum(Object.values(one.wasted), (amount) => amount.tokens));
  const rate = useRates({ issued, rows: found.trajectories || 0, step });
  const per = (name, unit) => found.is_live && rate(name) != null ? `${figure(rate(name))} ${unit} per second` : "";
  const served = live.flatMap((node) => node.live.map((one) => one.number));
  const places = [
    ["sources", "Sources", count(issued), [`${found.sources.length} ${found.sources.length === 1 ? "source" : "sources"}, tasks issued`, sum(found.sources, (one) => one.skipped) ? `${count(sum(found.sources, (one) => one.skipped))} skipped by rules` : "", per("issued", "tasks")]],
    ["tasks", "In flight", found.is_live ? count(sum(found.policies, (one) => one.issued)) : DASH, ["groups on nodes", found.is_live ? `${count(leases)} of ${count(slots)} slots` : ""]],
    ["nodes", "Nodes", found.is_live ? `${live.length} of ${found.nodes.length}` : DASH, ["live", found.tokens_per_s == null ? "" : `${count(found.tokens_per_s)} tokens per second`]],
    ["ledger", "Ledger", count(found.trajectories), ["trajectories", per("rows", "rows"), produced ? `${percent(lost / produced)} of tokens lost` : ""]],
    ["stages", "Stages", found.stages.length ? count(sum(found.stages, (one) => one.behind)) : DASH, [found.stages.length ? "rows behind" : "none", ...found.stages.map((one) => `${one.name}: ${count(one.behind)}`)]],
    ["ready", "Ready", found.is_live ? count(sum(found.policies, (one) => one.ready)) : DASH, ["groups wait for a batch", found.is_live ? `${count(sum(found.policies, (one) => one.sealed))} sealed` : ""]],
    ["step", "Trainers", `${count(step)}`, [`of ${count(sum(found.steps, (one) => one.steps))} steps`, per("step", "steps")]],
    ["weights", "Weights", Object.entries(found.versions).map(([, number]) => `v${number}`).join(", ") || DASH, ["newest published", served.length ? `nodes serve ${[...new Set([Math.min(...served), Math.max(...served)])].map((one) => `v${one}`).join(" to ")}` : ""]],
  ];
  return html`${!found.is_live && html`<p class="soft">The run is not running: totals only, no queues.</p>`}
    <div class="flow">${places.map(([key, name, value, lines]) => html`<div class="place ${key === found.bottleneck ? "slow" : ""}"><h3>${name}${key === found.bottleneck ? html` <span class="chip warn">bottleneck</span>` : ""}</h3><b data-place=${key}>${value}</b>${lines.filter(Boolean).map((line) => html`<p>${line}</p>`)}</div>`)}</div>
    ${found.policies.length > 0 && html`<section class="panel scroll"><h2>Policies</h2><table><thead><tr><th>policy</th><th class="num">step</th><th class="num">issued</th><th class="num">ready</th><th class="num">sealed</th><th class="num">room</th><th class="num">staleness</th><th class="num">published</th></tr></thead><tbody>${found.policies.map((one) => html`<tr><td>${one.policy}</td><td class="num">${count(one.number)} / ${count(one.steps)}</td><td class="num">${count(one.issued)}</td><td class="num">${count(one.ready)}</td><td class="num">${count(one.sealed)}</td><td class="num">${count(one.room)}</td><td class="num">${figure(one.staleness_mean)}</td><td class="num">v${one.published}</td></tr>`)}</tbody></table></section>`}
    ${found.waiting.length > 0 && html`<section class="panel"><h2>Waiting now</h2><table><tbody>${found.waiting.map((one) => html`<tr><td>${one.who}</td><td>${one.on}</td><td class="num">${duration(one.since_s)}</td></tr>`)}</tbody></table></section>`}`;
}

export function Stalls({ run }) {
  const state = useGet(`/api/runs/${encodeURIComponent(run.key)}/stalls`, run.at);
  return html`<h1>Stalls</h1><${Shown} of=${state}>${(found) => html`<p class="soft">A run counts as stalled after ${duration(found.limit_s)} without progress; then the launcher will ${found.action === "restart" ? "restart what the others wait for" : "end the run"}.</p>
    <section class="panel"><h2>Who waits for whom</h2>${found.chain.length ? html`<ol>${found.chain.map((link) => html`<li>${link}</li>`)}</ol>` : html`<p class="quiet">${found.is_live ? "Nobody waits." : "The run is not running."}</p>`}</section>
    ${found.alarms.length > 0 && html`<section class="panel"><h2>Alarms</h2><ul class="notes">${found.alarms.map((one) => html`<li class="warn">${one}</li>`)}</ul></section>`}
    ${found.work.length > 0 && html`<section class="panel scroll"><h2>What nodes are busy with</h2><table><tbody>${found.work.flatMap((node) => node.work.map((one) => html`<tr><td>${node.node}</td><td class="mono">${Object.values(one).map(String).join(" · ")}</td></tr>`))}</tbody></table></section>`}
    <section class="panel"><h2>Recorded stalls</h2>${found.records.length ? found.records.map((one) => html`<details><summary class="mono">${one.file}</summary><pre class="scroll">${JSON.stringify(one.record, null, 2)}</pre></details>`) : html`<p class="quiet">None.</p>`}</section>`}<//>`;
}
