// SPDX-License-Identifier: Apache-2.0
// What the models said: a list in pages, one trajectory as conversation or tokens, a group side by side.
import { useEffect, useState } from "preact/hooks";
import { DASH, Shown, address, clock, colour, count, duration, figure, get, go, html, useGet } from "./lib.js";

const FILTERS = { outcome: ["", "completed", "truncated", "failed", "cancelled"], fate: ["", "trained", "waits", "dropped", "not scored"], order: ["newest", "best", "worst"] };
const tone = (text) => text === "trained" || text === "completed" ? "good" : text.startsWith("dropped") || text === "failed" ? "bad" : "";
const api = (run, ...parts) => `/api/runs/${[run.key, ...parts].map(encodeURIComponent).join("/")}`;

export function Trajectories({ run, query }) {
  const asked = Object.fromEntries(["text", "outcome", "fate", "policy", "node", "step", "order", "evaluations"].map((name) => [name, query.get(name) || ""]));
  const mark = new URLSearchParams(Object.entries(asked).filter(([, value]) => value)).toString();
  const [page, setPage] = useState(null);
  const [error, setError] = useState("");
  const [isBusy, setBusy] = useState(false);
  const [at, setAt] = useState(-1);
  const set = (name) => (event) => go(run.key, "trajectories", "", { ...asked, [name]: event.target.type === "checkbox" ? (event.target.checked ? "1" : "") : event.target.value });
  const load = async (before, signal) => {
    setBusy(true);
    try {
      const found = await get(`${api(run, "rows")}?${mark}${before ? `&before=${before}` : ""}`, signal);
      setPage((known) => before && known ? { ...found, rows: [...known.rows, ...found.rows] } : found);
      setError("");
    } catch (problem) { if (!signal?.aborted) setError(problem.message); }
    setBusy(false);
  };
  useEffect(() => { const stop = new AbortController(); setAt(-1); load("", stop.signal); return () => stop.abort(); }, [mark, run.key]);
  useEffect(() => {
    const pressed = ({ detail }) => {
      const rows = page?.rows || [];
      if (detail === "j" || detail === "k") setAt((now) => Math.max(0, Math.min(rows.length - 1, now + (detail === "j" ? 1 : -1))));
      if (detail === "Enter" && rows[at]) go(run.key, "trajectory", rows[at].row_id);
    };
    document.addEventListener("list-key", pressed);
    return () => document.removeEventListener("list-key", pressed);
  });
  useEffect(() => { document.querySelector("tr.at")?.scrollIntoView({ block: "nearest" }); }, [at]);
  return html`<h1>Trajectories</h1><p class="soft">${count(run.trajectories)} delivered, of every outcome</p>
    <form class="tools" onSubmit=${(event) => event.preventDefault()}>
      <input class="field" type="search" aria-label="Search" placeholder="Id, task or text" value=${asked.text} onChange=${set("text")} />
      ${["outcome", "fate", "order"].map((name) => html`<label>${name} <select class="field" value=${asked[name] || FILTERS[name][0]} onChange=${set(name)}>${FILTERS[name].map((one) => html`<option value=${one}>${one || "any"}</option>`)}</select></label>`)}
      ${run.policies.length > 1 && html`<label>policy <select class="field" value=${asked.policy} onChange=${set("policy")}><option value="">any</option>${run.policies.map((one) => html`<option>${one.policy}</option>`)}</select></label>`}
      <label>step <input class="field" type="number" min="0" size="6" value=${asked.step} onChange=${set("step")} /></label>
      <label><input type="checkbox" checked=${asked.evaluations === "1"} onChange=${set("evaluations")} /> evaluations</label></form>
    ${error && html`<p class="error" role="alert">${error}</p>`}
    ${page && html`<section class="panel scroll"><table><thead><tr><th>trajectory</th><th class="num">reward</th><th>outcome</th><th>fate</th><th class="wide">task</th><th class="num">tokens</th><th class="wide">version</th><th class="wide">node</th><th class="num">at</th></tr></thead>
      <tbody>${page.rows.map((row, i) => html`<tr class="link ${i === at ? "at" : ""}" key=${row.row_id} onClick=${(event) => event.target.tagName === "A" || go(run.key, "trajectory", row.row_id)}>
        <td class="nowrap"><a class="mono" href=${address(run.key, "trajectory", row.row_id)}>${row.row_id}</a></td><td class="num">${figure(row.reward)}</td><td><span class="chip ${tone(row.outcome)}">${row.outcome}</span></td>
        <td class="nowrap"><span class="chip ${tone(row.fate)}">${row.fate}${row.steps.length ? ` in step ${row.steps.join(", ")}` : ""}</span></td><td class="cut mono wide">${row.task}</td><td class="num">${count(row.tokens)}</td><td class="nowrap soft wide">${row.versions.join(", ")}</td><td class="nowrap soft wide">${row.node}</td><td class="num soft">${clock(row.at)}</td></tr>`)}</tbody></table>
      ${page.rows.length === 0 && html`<p class="quiet">${page.is_complete ? "No trajectory matches." : "None in the part that was searched."}</p>`}</section>
      ${asked.order && asked.order !== "newest" && !asked.step && html`<p class="quiet">Of the newest ${asked.fate || asked.text ? "4,000" : "20,000"}.</p>`}
      ${page.next && html`<button class="more" disabled=${isBusy} onClick=${() => load(page.next)}>${isBusy ? "Reading …" : page.rows.length ? "Show more" : "Search further back"}</button>`}`}`;
}

// --- one trajectory

export function Trajectory({ run, id }) {
  const state = useGet(api(run, "rows", id));
  const [mode, setMode] = useState("conversation");
  return html`<${Shown} of=${state}>${(found) => html`
    <p><a href=${address(run.key, "trajectories")}>Trajectories</a> · <a href=${address(run.key, "group", found.sample.group_id)}>group ${found.sample.group_id}</a> · <a href=${address(run.key, "lineage", "", { id })}>lineage</a></p>
    <${Head} run=${run} found=${found} />
    <p class="soft">${found.siblings.map((one) => one === id ? html`<b class="mono">${one}</b> ` : html`<a class="mono" href=${address(run.key, "trajectory", one)}>${one}</a> `)}</p>
    <div class="tools"><div class="tabs">${["conversation", "tokens"].map((one) => html`<button aria-pressed=${mode === one} onClick=${() => setMode(one)}>${one}</button>`)}</div></div>
    <section class="panel">${mode === "tokens" ? html`<${Tokens} found=${found} />` : html`<${Conversation} found=${found} />`}</section>
    <${Evidence} found=${found} run=${run} />`}<//>`;
}

function Head({ found }) {
  const one = found.sample;
  return html`<h1 class="mono">${one.row_id}</h1><dl class="facts">
    <div class="fact"><dt>reward</dt><dd>${figure(one.reward)} <small>${found.relative == null ? "" : `${found.relative >= 0 ? "+" : ""}${figure(found.relative)} against its group`}</small></dd></div>
    ${Object.entries(one.role_rewards).map(([role, value]) => html`<div class="fact"><dt>reward of ${role}</dt><dd>${figure(value)}</dd></div>`)}
    <div class="fact"><dt>outcome</dt><dd>${one.outcome} <small>${found.reason}</small></dd></div>
    <div class="fact"><dt>fate</dt><dd>${one.fate || DASH} <small>${one.steps.length ? `step ${one.steps.join(", ")}` : ""}</small></dd></div>
    <div class="fact"><dt>tokens</dt><dd>${count(one.num_tokens)} <small>${one.turns.length} ${one.turns.length === 1 ? "turn" : "turns"}</small></dd></div>
    <div class="fact"><dt>took</dt><dd>${found.ended_at ? duration(found.ended_at - found.started_at) : DASH} <small>on ${one.node}</small></dd></div></dl>
    ${one.detail && html`<p class="error">${one.detail}</p>`}
    ${one.state !== "stored" && html`<p class="quiet">Its text is ${one.state}. dataflow.keep and dataflow.keep_mb decide what a run keeps.</p>`}`;
}

export function Conversation({ found }) {
  const one = found.sample;
  const tools = (turn) => one.tool_uses.filter((use) => use.turn === turn).map((use) => html`<div class="turn tool ${use.is_error ? "bad" : ""}"><h3>tool ${use.name} · ${duration(use.seconds)}</h3><pre>${use.arguments}</pre><pre class="soft">${use.result}</pre></div>`);
  return html`<div class="turn"><h3>task · ${one.source}</h3><pre>${JSON.stringify(one.task, null, 2)}</pre></div>${tools(-1)}
    ${one.turns.map((turn, i) => html`${turn.prompt && html`<div class="turn"><h3>${turn.parent >= 0 ? `added to the context of turn ${turn.parent + 1}` : "prompt"}</h3><pre>${turn.prompt}</pre></div>`}
      <div class="turn model"><h3>${turn.role || turn.policy}${turn.agent ? ` · agent ${turn.agent}` : ""} · ${turn.versions.join(", ")} · ${count(turn.num_tokens)} tokens · ${turn.finish}${turn.reward == null ? "" : ` · reward ${figure(turn.reward)}`}</h3>
        ${turn.reasoning && html`<pre class="reason">${turn.reasoning}</pre>`}<pre>${turn.answer}</pre>${turn.tool_calls.map((call) => html`<pre class="soft">${call.name}(${call.arguments})</pre>`)}</div>${tools(i)}`)}`;
}

function Tokens({ found }) {
  const columns = [...new Set(found.tokens.flatMap((turn) => Object.keys(turn.columns)))];
  const [by, setBy] = useState("log-prob");
  const [tip, setTip] = useState("");
  const versions = [...new Set(found.tokens.flatMap((turn) => turn.versions))];
  const value = (turn, i) => by === "log-prob" ? turn.log_probs[i] : by === "advantage" ? found.relative : by in turn.columns ? turn.columns[by][i] : null;
  const all = found.tokens.flatMap((turn) => turn.sampled.map((_, i) => value(turn, i))).filter((one) => one != null);
  const low = Math.min(...all), high = Math.max(...all);
  const paint = (turn, i) => {
    if (by === "version") return mix(colour(versions.indexOf(turn.versions[i])), 30);
    if (by === "mask") return turn.is_trained ? mix("var(--good)", 28) : "transparent";
    const one = value(turn, i);
    if (one == null) return "transparent";
    if (by === "log-prob") return mix("var(--bad)", Math.min(80, 18 * -one));
    if (by === "advantage") return mix(one >= 0 ? "var(--good)" : "var(--bad)", Math.min(70, 70 * Math.abs(one) / (found.deviation || 1) / 2));
    return mix("var(--s2)", high > low ? 75 * (one - low) / (high - low) : 30);
  };
  const say = (turn, i) => `${JSON.stringify(turn.sampled[i])}  log-prob ${turn.log_probs[i]?.toFixed(4)}  p ${(Math.exp(turn.log_probs[i]) * 100).toFixed(1)} %  ${turn.versions[i]}${turn.is_trained ? "" : "  not trained"}${columns.map((name) => turn.columns[name] ? `  ${name} ${figure(turn.columns[name][i])}` : "").join("")}`;
  if (!found.tokens.length) return html`<p class="quiet">Its tokens are not stored.</p>`;
  return html`<div class="tools"><span class="soft">colour by</span><div class="tabs">${["log-prob", "advantage", "version", "mask", ...columns].map((name) => html`<button aria-pressed=${by === name} onClick=${() => setBy(name)}>${name}</button>`)}</div></div>
    <p class="legend">${by === "log-prob" ? "The redder, the less likely the token was." : by === "advantage" ? `Reward minus the mean of its group, the same for every token: ${figure(found.relative)}` : by === "version" ? versions.map((one, i) => html`<span><i style=${{ background: colour(i) }}></i>${one}</span>`) : by === "mask" ? "Green tokens are trained; others are context, or never reached the agent." : `From ${figure(low)} to ${figure(high)}`}</p>
    ${!columns.includes("entropy") && html`<p class="quiet">Engines record no entropy; a stage that writes a column of one number per token is shown here too.</p>`}
    ${found.tokens.map((turn, t) => html`<div class="turn model"><h3>${turn.role || turn.policy}${turn.agent ? ` · agent ${turn.agent}` : ""}</h3><div class="tokens"><span class="context">${turn.prompt.join("")}</span>${turn.sampled.map((text, i) => html`<span class="sampled" style=${{ background: paint(turn, i) }} onMouseEnter=${() => setTip(say(turn, i))}>${text}</span>`)}</div>${turn.num_left_out ? html`<p class="quiet">${count(turn.num_left_out)} more tokens are left out.</p>` : ""}</div>`)}
    <p class="tip" aria-live="polite">${tip}</p>`;
}
const mix = (name, share) => `color-mix(in srgb, ${name} ${Math.round(share)}%, transparent)`;

function Evidence({ found }) {
  const uses = found.uses, columns = Object.entries(found.columns);
  return html`<div class="grid"><section class="panel w6"><h2>What each policy did with its group</h2>${uses.length ? html`<table><thead><tr><th>policy</th><th>fate</th><th>rule</th><th>reason</th><th class="num">batch</th><th class="num">step</th></tr></thead><tbody>${uses.map((use) => html`<tr><td>${use.policy}</td><td>${use.fate}</td><td>${use.rule || DASH}</td><td>${use.reason || DASH}</td><td class="num">${use.batch || DASH}</td><td class="num">${use.step ?? DASH}</td></tr>`)}</tbody></table>` : html`<p class="quiet">None judged it.</p>`}</section>
    <section class="panel w6"><h2>Reward evidence</h2>${columns.length || Object.keys(found.sample.role_rewards).length ? html`<table><tbody>${[["reward", found.sample.reward], ...Object.entries(found.sample.role_rewards), ...columns].map(([name, one]) => html`<tr><td>${name}</td><td class="num">${figure(one)}</td></tr>`)}</tbody></table>` : html`<p class="quiet">One reward, ${figure(found.sample.reward)}, and no column of a stage.</p>`}</section></div>`;
}

export function Group({ run, id }) {
  const state = useGet(api(run, "groups", id));
  return html`<${Shown} of=${state}>${(found) => html`<p><a href=${address(run.key, "trajectories")}>Trajectories</a> · <a href=${address(run.key, "lineage", "", { id })}>lineage</a></p>
    <h1>Group ${found.group_id}</h1><p class="soft">${found.rows.length} attempts · mean reward ${figure(found.mean)} · deviation ${figure(found.deviation)}</p>
    <div class="side-by-side">${found.rows.map((one) => html`<section class="panel"><h2><a class="mono" href=${address(run.key, "trajectory", one.sample.row_id)}>${one.sample.row_id}</a></h2><p>reward <b>${figure(one.sample.reward)}</b> <span class=${one.relative > 0 ? "good" : one.relative < 0 ? "bad" : "quiet"}>${one.relative == null ? "" : `${one.relative >= 0 ? "+" : ""}${figure(one.relative)}`}</span> <span class="chip ${tone(one.sample.outcome)}">${one.sample.outcome}</span></p>${one.sample.state === "stored" ? html`<${Conversation} found=${one} />` : html`<p class="quiet">Its text is ${one.sample.state}.</p>`}</section>`)}</div>`}<//>`;
}
