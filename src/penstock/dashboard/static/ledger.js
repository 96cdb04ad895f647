// SPDX-License-Identifier: Apache-2.0
// What the ledger knows: lineage of an id, decisions of the rules, versions, and where all of it went.
import { Parts } from "./charts.js";
import { DASH, Shown, activityColour, address, bytes, colour, count, duration, figure, go, html, moment, percent, short, useGet } from "./lib.js";

const api = (run, rest) => `/api/runs/${encodeURIComponent(run.key)}/${rest}`;
const link = (run, id, kind) => address(run.key, "lineage", "", { id });

export function Lineage({ run, query }) {
  const id = query.get("id") || "";
  const state = useGet(id && api(run, `explain?id=${encodeURIComponent(id)}`));
  return html`<h1>Lineage</h1><form class="tools" onSubmit=${(event) => { event.preventDefault(); go(run.key, "lineage", "", { id: event.target.elements.id.value.trim() }); }}>
    <input class="field" type="search" name="id" aria-label="Id" placeholder="Group p0-17, row p0-17.2.1, batch POLICY.5, version POLICY@1.5 or a task key" value=${id} /><button class="more">Explain</button></form>
    ${!id ? html`<p class="quiet">Every id leads to those before and after it: a task to its groups, a row to its batch, a batch to the version that it made.</p>` : html`<${Shown} of=${state}>${(found) => html`<${Story} run=${run} found=${found} />`}<//>`}`;
}

/** Related ids by kind: `group 1`, `group 2` and so on are groups. */
function kinds(related) {
  const found = new Map();
  for (const [label, id] of Object.entries(related)) {
    const kind = label.replace(/ \d+$/, "");
    found.set(kind, [...(found.get(kind) || []), id]);
  }
  return [...found];
}

function Story({ run, found }) {
  const times = found.steps.map((one) => one.at).filter(Boolean), first = Math.min(...times);
  return html`<section class="panel"><h2>${found.kind} <span class="mono">${found.id}</span></h2><p>${found.summary}</p>
    ${found.kind === "row" && html`<p><a href=${address(run.key, "trajectory", found.id)}>its text and tokens</a></p>`}${found.kind === "group" && html`<p><a href=${address(run.key, "group", found.id)}>its attempts side by side</a></p>`}
    <p class="soft">${kinds(found.related).map(([label, ids]) => html`${label}${ids.length > 1 ? "s" : ""} ${ids.map((id) => html`<a class="mono" href=${link(run, id)}>${id}</a> `)}  `)}</p></section>
    <section class="panel"><h2>${times.length ? `From ${moment(first)}` : "Events"}</h2><ol class="story">${found.steps.map((one) => html`<li><time>${one.at ? `+${duration(one.at - first)}` : ""}</time><span>${one.text}</span></li>`)}</ol></section>`;
}

export function Rules({ run }) {
  const state = useGet(api(run, "rules"), run.policies.map((one) => one.step).join());
  return html`<h1>Data rules</h1><${Shown} of=${state}>${(found) => html`<p class="soft">Of the newest ${count(found.looked_at)} decisions of each policy.</p>
    ${Object.entries(found.policies).map(([policy, lines]) => html`<section class="panel scroll"><h2>${policy}</h2>${lines.length ? html`<table><thead><tr><th>rule</th><th>verdict</th><th>reason</th><th class="num">groups</th><th class="num">tokens</th><th>examples</th></tr></thead><tbody>${lines.map((one) => html`<tr><td>${one.rule || DASH}</td><td><span class="chip ${one.verdict === "dropped" ? "bad" : "good"}">${one.verdict}</span></td><td>${one.reason || DASH}</td><td class="num">${count(one.groups)}</td><td class="num">${count(one.tokens)}</td><td class="nowrap">${one.examples.map((example) => html`<a class="mono" href=${link(run, example.group_id)}>${example.group_id}</a> `)}</td></tr>`)}</tbody></table>` : html`<p class="quiet">No group was judged yet.</p>`}</section>`)}
    <div class="grid"><section class="panel w6"><h2>Tasks that rules skipped</h2><table><thead><tr><th>source</th><th class="num">tasks</th><th class="num">skipped</th></tr></thead><tbody>${found.skipped.map((one) => html`<tr><td>${one.source}</td><td class="num">${count(one.tasks)}</td><td class="num">${count(one.skipped)}</td></tr>`)}</tbody></table></section>
      <section class="panel w6"><h2>Configured</h2>${found.configured.length ? html`<pre class="scroll">${JSON.stringify(found.configured, null, 2)}</pre>` : html`<p class="quiet">No rule of its own: the defaults decide.</p>`}</section></div>
    ${found.others.length > 0 && html`<section class="panel scroll"><h2>Other decisions, and errors of rules</h2><table><thead><tr><th>hook</th><th>rule</th><th>about</th><th>verdict</th><th>detail</th></tr></thead><tbody>${found.others.map((one) => html`<tr><td>${one.hook}</td><td>${one.rule}</td><td class="mono">${one.subject}</td><td>${one.verdict}</td><td class="mono">${one.detail}</td></tr>`)}</tbody></table></section>`}`}<//>`;
}

export function Weights({ run }) {
  const state = useGet(api(run, "weights"), run.policies.map((one) => one.step).join());
  return html`<h1>Weights</h1><${Shown} of=${state}>${(found) => html`<p class="soft">${count(found.num_stored)} versions are stored; the newest ${count(found.versions.length)} that were published:</p>
    ${found.damaged.length > 0 && html`<p class="error">${count(found.damaged.length)} manifests are damaged; \`penstock weights verify\` says more.</p>`}
    <section class="panel scroll"><table><thead><tr><th>version</th><th>kept</th><th class="num">bytes</th><th class="num">delta</th><th class="num">delta / full</th><th>served by</th><th>weights</th><th class="num">published</th></tr></thead><tbody>${found.versions.map((one) => { const id = `${one.policy}@${one.incarnation}.${one.number}`; return html`<tr><td><a class="mono" href=${link(run, id)}>${id}</a></td><td><span class="chip ${one.kept === "whole" ? "good" : ""}">${one.kept}</span></td><td class="num">${bytes(one.bytes)}</td><td class="num">${bytes(one.delta_bytes)}</td><td class="num">${percent(one.density)}</td><td>${one.served_by.join(", ") || DASH}</td><td class="mono soft">${one.digest}</td><td class="num soft">${moment(one.at)}</td></tr>`; })}</tbody></table></section>`}<//>`;
}

export function Spend({ run }) {
  const state = useGet(api(run, "spend"), run.policies.map((one) => one.step).join());
  return html`<h1>Spend</h1><${Shown} of=${state}>${(found) => html`<p class="soft">Every sampled token and every minute of a sandbox has one fate, every second one activity; the parts sum to the whole.</p>
    ${Object.entries(found.tokens).map(([policy, account]) => { const boxed = account.whole.sandbox_ms > 0; return html`<section class="panel scroll"><h2>Tokens of ${policy}</h2><${Parts} whole=${account.whole.tokens} write=${count} parts=${account.parts.map((one, i) => ({ label: one.fate, value: one.tokens, colour: tint(one.fate, i) }))} />
      <table><thead><tr><th>fate</th><th class="num">tokens</th><th class="num">share</th><th class="num">trajectories</th>${boxed && html`<th class="num">sandboxes</th>`}</tr></thead><tbody>${account.parts.map((one, i) => html`<tr><td><i class="dot" style=${{ background: tint(one.fate, i) }}></i> ${one.fate}</td><td class="num">${count(one.tokens)}</td><td class="num">${percent(account.whole.tokens ? one.tokens / account.whole.tokens : null)}</td><td class="num">${count(one.sequences)}</td>${boxed && html`<td class="num">${duration(one.sandbox_ms / 1000)}</td>`}</tr>`)}<tr><td><b>whole</b></td><td class="num"><b data-count="tokens">${count(account.whole.tokens)}</b></td><td class="num"><b>${percent(1)}</b></td><td class="num"><b data-count="sequences">${count(account.whole.sequences)}</b></td>${boxed && html`<td class="num"><b data-count="sandbox_ms">${duration(account.whole.sandbox_ms / 1000)}</b></td>`}</tr></tbody></table>
      ${account.replayed.tokens > 0 && html`<p class="quiet">${count(account.replayed.tokens)} tokens were trained again from replay, at no cost of sampling.</p>`}</section>`; })}
    ${found.seconds.map((one) => html`<section class="panel scroll"><h2>Seconds of ${one.who}, ${duration(one.total_s)} since the service last started</h2><${Parts} whole=${one.total_s} write=${duration} parts=${Object.entries(one.seconds).map(([label, value]) => ({ label, value, colour: activityColour(label) }))} /><div class="legend">${Object.entries(one.seconds).map(([label, value]) => html`<span><i style=${{ background: activityColour(label) }}></i>${label.replace("_", " ")} ${duration(value)} (${percent(one.total_s ? value / one.total_s : null)})</span>`)}</div></section>`)}
    <section class="panel"><h2>Budget</h2><table><tbody><tr><td>tokens</td><td class="num">${count(found.budget.used_tokens)}</td><td class="num">${found.budget.tokens ? `of ${count(found.budget.tokens)}` : "no limit"}</td></tr><tr><td>hours of nodes</td><td class="num">${figure(found.budget.used_node_hours)}</td><td class="num">${found.budget.node_hours ? `of ${figure(found.budget.node_hours)}` : "no limit"}</td></tr></tbody></table></section>`}<//>`;
}
const tint = (fate, i) => fate === "trained" ? "var(--s0)" : fate.startsWith("waits") ? "var(--line)" : colour(i);
