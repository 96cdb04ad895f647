// SPDX-License-Identifier: Apache-2.0
// How the run is doing: what it reached, what needs a look, its curves; several runs side by side.
import { useEffect, useState } from "preact/hooks";
import { LineChart } from "./charts.js";
import { DASH, Shown, address, count, duration, figure, get, go, html, keep, moment, percent, short } from "./lib.js";

const METRICS = ["reward/mean", "staleness/mean", "trained tokens per second", "completions/mean_length", "entropy", "loss", "grad_norm", "kl", "seconds per step", "advantage/zero_share"];
const TITLES = { "reward/mean": "mean reward", "staleness/mean": "staleness, in versions", "completions/mean_length": "tokens per answer", grad_norm: "gradient norm", kl: "KL to the sampling policy", "advantage/zero_share": "share of samples without advantage", "seconds per step": "seconds per step" };

export const totals = (run) => Object.values(run.totals).reduce((sum, one) => {
  const wasted = Object.values(one.wasted).reduce((all, amount) => all + amount.tokens, 0);
  return { produced: sum.produced + one.produced.tokens, wasted: sum.wasted + wasted };
}, { produced: 0, wasted: 0 });
export const wasteShare = (run) => { const all = totals(run); return all.produced ? all.wasted / all.produced : null; };

function useCurves(runs, metrics) {
  const [found, set] = useState({ data: null, error: null });
  const mark = runs.map((run) => run.key + run.policies.map((one) => one.step)).join() + metrics;
  useEffect(() => {
    const stop = new AbortController();
    Promise.all(runs.map((run) => get(`/api/runs/${encodeURIComponent(run.key)}/curves?metrics=${encodeURIComponent(metrics)}`, stop.signal)))
      .then((data) => set({ data, error: null })).catch((error) => stop.signal.aborted || set((known) => keep(known) || { data: null, error: error.message }));
    return () => stop.abort();
  }, [mark]);
  return found;
}

export function Overview({ run, runs }) {
  const [isCompared, compare] = useState(runs.length > 1);
  const [chosen, choose] = useState([]);
  const shown = isCompared ? runs : [run];
  const metrics = [...METRICS, ...chosen];
  const curves = useCurves(shown, metrics);
  const label = (one, policy) => [shown.length > 1 && one.key, one.policies.length > 1 && policy].filter(Boolean).join(" · ") || policy;
  let index = 0;
  const numbers = new Map(shown.flatMap((one) => one.policies.map((policy) => [one.key + "/" + policy.policy, index++])));
  const seriesOf = (metric) => shown.flatMap((one, n) => (curves.data?.[n]?.series || []).filter((s) => s.metric === metric && s.values.some((v) => v != null))
    .map((s) => ({ label: label(one, s.policy), steps: s.steps, values: s.values, index: numbers.get(one.key + "/" + s.policy) })));
  const suites = [...new Set(shown.flatMap((_, n) => (curves.data?.[n]?.evaluations || []).map((one) => one.suite)))];
  const scores = suites.map((suite) => [suite, shown.flatMap((one, n) => {
    const points = (curves.data?.[n]?.evaluations || []).filter((p) => p.suite === suite);
    return [...new Set(points.map((p) => p.policy))].map((policy) => {
      const own = points.filter((p) => p.policy === policy);
      return { label: label(one, policy), steps: own.map((p) => p.step), values: own.map((p) => p.score), index: numbers.get(one.key + "/" + policy) ?? 0, dots: true };
    });
  })]);
  const names = [...new Set((curves.data || []).flatMap((one) => one.names))].filter((name) => !metrics.includes(name));
  return html`<h1>${isCompared ? `${runs.length} runs` : run.name}</h1>
    ${isCompared ? html`<${Comparison} runs=${runs} />` : html`<${Facts} run=${run} />
      <section class="panel"><h2>Health</h2><ul class="notes">${run.health.map((one) => html`<li class=${one.level}>${one.text}</li>`)}</ul></section>`}
    <div class="tools">${runs.length > 1 && html`<div class="tabs"><button aria-pressed=${isCompared} onClick=${() => compare(true)}>All runs</button><button aria-pressed=${!isCompared} onClick=${() => compare(false)}>This run</button></div>`}
      <span class="grow"></span><label>Add a metric <select class="field" value="" onChange=${(event) => event.target.value && choose([...chosen, event.target.value])}><option value=""></option>${names.map((name) => html`<option>${name}</option>`)}</select></label></div>
    ${curves.error && html`<p class="error" role="alert">${curves.error}</p>`}
    <div class="grid"><${LineChart} title="mean reward" width=${scores.length ? "w8" : "w12"} height=${230} series=${seriesOf("reward/mean")} />
      ${scores.map(([suite, series]) => html`<${LineChart} title=${`evaluation: ${suite}`} width="w4" height=${230} series=${series} />`)}
      ${metrics.slice(1).map((metric) => [metric, seriesOf(metric)]).filter(([, series]) => series.length).map(([metric, series]) => html`<${LineChart} key=${metric} title=${TITLES[metric] || metric} series=${series} />`)}</div>`;
}

function Fact({ name, children }) {
  return html`<div class="fact"><dt>${name}</dt><dd>${children}</dd></div>`;
}

function Facts({ run }) {
  const age = run.started_at ? (run.ended_at || run.at) - run.started_at : null;
  return html`<p class="soft">${run.started_at ? `started ${moment(run.started_at)}` : "its services were started one by one"}${run.ended_at ? `, ended ${moment(run.ended_at)}` : ""}</p>
    <dl class="facts">${run.policies.map((one) => html`<${Fact} name=${run.policies.length > 1 ? `${one.policy}: step` : "step"}>${count(one.step)} <small>of ${count(one.steps)}${one.skipped ? `, ${one.skipped} skipped` : ""}</small><//>
        <${Fact} name=${run.policies.length > 1 ? `${one.policy}: reward` : "reward"}>${figure(one.reward)}<//>`)}
      ${run.evaluations.map((one) => html`<${Fact} name=${one.suite}>${figure(one.score)} <small>at step ${one.step}</small><//>`)}
      <${Fact} name="trajectories"><span data-count="trajectories">${count(run.trajectories)}</span><//>
      <${Fact} name="waste">${percent(wasteShare(run))} <small>of ${short(totals(run).produced)} tokens</small><//>
      ${run.tokens_per_s != null && html`<${Fact} name="tokens per second">${count(run.tokens_per_s)}<//>`}
      ${run.eta_s != null && html`<${Fact} name="time left">${duration(run.eta_s)}<//>`}
      ${age != null && html`<${Fact} name=${run.ended_at ? "took" : "running for"}>${duration(age)}<//>`}</dl>`;
}

function Comparison({ runs }) {
  return html`<section class="panel scroll"><table><thead><tr><th>run</th><th>state</th><th>policy</th><th class="num">step</th><th class="num">reward</th><th class="num">evaluation</th><th class="num">trajectories</th><th class="num">waste</th><th class="num">tokens/s</th><th class="num">time left</th></tr></thead>
    <tbody>${runs.flatMap((run) => run.policies.map((policy, i) => html`<tr class="link" onClick=${() => go(run.key, "overview")}><td>${i ? "" : html`<a href=${address(run.key, "overview")}>${run.key}</a>`}</td><td><span class="state"><i class="dot ${run.state}"></i>${run.state}</span></td><td>${policy.policy}</td><td class="num">${count(policy.step)} / ${count(policy.steps)}</td><td class="num">${figure(policy.reward)}</td>
      <td class="num">${run.evaluations.filter((one) => one.policy === policy.policy).map((one) => `${one.suite} ${figure(one.score)}`).join(", ") || DASH}</td><td class="num">${count(run.trajectories)}</td><td class="num">${percent(wasteShare(run))}</td><td class="num">${count(run.tokens_per_s)}</td><td class="num">${duration(run.eta_s)}</td></tr>`))}</tbody></table></section>`;
}
