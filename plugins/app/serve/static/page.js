"use strict";

const byId = (id) => document.getElementById(id);
const messages = [];
let running = null;

const headers = () => {
  const key = byId("key").value.trim();
  return key ? { Authorization: `Bearer ${key}` } : {};
};

// Chat.

const show = (role, text) => {
  const said = document.createElement("div");
  said.className = `said ${role}`;
  said.textContent = text;
  byId("talk").append(said);
  byId("talk").scrollTop = byId("talk").scrollHeight;
  return said;
};

async function* events(body) {
  const decoder = new TextDecoder();
  let rest = "";
  for (const reader = body.getReader(); ; ) {
    const { done, value } = await reader.read();
    if (done) return;
    const blocks = (rest + decoder.decode(value, { stream: true })).split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) {
      const data = block.slice("data: ".length);
      if (data === "[DONE]") return;
      yield JSON.parse(data);
    }
  }
}

async function answer(said, signal) {
  const began = performance.now();
  const request = {
    messages,
    stream: true,
    stream_options: { include_usage: true },
    temperature: Number(byId("temperature").value),
    max_completion_tokens: Number(byId("max_tokens").value),
  };
  const response = await fetch("/v1/chat/completions", {
    method: "POST",
    headers: { "Content-Type": "application/json", ...headers() },
    body: JSON.stringify(request),
    signal,
  });
  if (!response.ok) throw new Error((await response.json()).error.message);
  let text = "";
  let first = 0;
  const reasoning = document.createElement("span");
  const content = document.createElement("span");
  reasoning.className = "reasoning";
  said.append(reasoning, content);
  try {
    for await (const event of events(response.body)) {
      if (event.error) throw new Error(event.error.message);
      first ||= performance.now();
      for (const choice of event.choices) {
        reasoning.append(choice.delta.reasoning_content ?? "");
        content.append(choice.delta.content ?? "");
        text += choice.delta.content ?? "";
      }
      if (event.usage) {
        const seconds = (performance.now() - first) / 1000;
        const rate = event.usage.completion_tokens / Math.max(seconds, 0.001);
        byId("speed").textContent = `${event.usage.completion_tokens} tokens, ${rate.toFixed(0)}/s, first after ${(first - began).toFixed(0)} ms`;
      }
      byId("talk").scrollTop = byId("talk").scrollHeight;
    }
  } finally {
    messages.push({ role: "assistant", content: text });
  }
}

byId("ask").addEventListener("submit", async (event) => {
  event.preventDefault();
  const text = byId("text").value;
  if (running || !text.trim()) return;
  byId("text").value = "";
  messages.push({ role: "user", content: text });
  show("user", text);
  const said = show("assistant", "");
  running = new AbortController();
  byId("stop").hidden = false;
  byId("send").hidden = true;
  try {
    await answer(said, running.signal);
  } catch (error) {
    if (error.name !== "AbortError") show("wrong", error.message);
  } finally {
    running = null;
    byId("stop").hidden = true;
    byId("send").hidden = false;
  }
});

byId("text").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    byId("ask").requestSubmit();
  }
});

byId("stop").addEventListener("click", () => running?.abort());
byId("clear").addEventListener("click", () => {
  running?.abort();
  messages.length = 0;
  byId("talk").replaceChildren();
});

// Composition and charts.

const share = (value) => `${(100 * value).toFixed(1)} %`;
const CHARTS = [
  ["tokens_per_second", "output tokens/s", (value) => value.toFixed(0)],
  ["ttft_median", "time to first token, median", (value) => `${(1000 * value).toFixed(1)} ms`],
  ["running", "running", String],
  ["waiting", "waiting", String],
  ["kv_usage", "KV cache in use", share],
  ["prefix_hit_rate", "prefix hit rate", share],
];
const POINTS = 120;
const SVG = "http://www.w3.org/2000/svg";

const charts = CHARTS.map(([field, name, format]) => {
  const chart = document.createElement("div");
  const line = document.createElement("div");
  const label = document.createElement("span");
  const value = document.createElement("b");
  const svg = document.createElementNS(SVG, "svg");
  const curve = document.createElementNS(SVG, "polyline");
  chart.className = "chart";
  chart.dataset.field = field;
  label.textContent = name;
  value.textContent = "–";
  svg.setAttribute("viewBox", `0 0 ${POINTS - 1} 40`);
  svg.setAttribute("preserveAspectRatio", "none");
  svg.append(curve);
  line.append(label, value);
  chart.append(line, svg);
  byId("charts").append(chart);
  return { field, format, value, curve, seen: [] };
});

function draw(chart, found) {
  chart.value.textContent = found === null ? "–" : chart.format(found);
  chart.seen.push(found ?? 0);
  if (chart.seen.length > POINTS) chart.seen.shift();
  const most = Math.max(...chart.seen, 1e-9);
  const from = POINTS - chart.seen.length;
  const points = chart.seen.map((y, x) => `${from + x},${(38 - (36 * y) / most).toFixed(1)}`);
  chart.curve.setAttribute("points", points.join(" "));
}

async function fetched(path) {
  const response = await fetch(path, { headers: headers() });
  const body = await response.json();
  if (!response.ok) throw new Error(body.error.message);
  return body;
}

async function compose() {
  const found = await fetched("/composition");
  byId("model").textContent = `${found.models[0]} on ${found.device}, ${found.max_len} tokens`;
  const rows = Object.entries(found.parts).filter(([, parts]) => parts.length);
  byId("parts").replaceChildren(
    ...rows.map(([kind, parts]) => {
      const row = document.createElement("tr");
      const name = row.insertCell();
      name.textContent = kind;
      const cell = row.insertCell();
      cell.textContent = parts.map((part) => part.name).join(", ");
      cell.title = parts.map((part) => part.package).join(", ");
      return row;
    }),
  );
}

function showReplicas(replicas) {
  byId("fleet").hidden = replicas.length < 2;
  byId("replicas").replaceChildren(
    ...replicas.map((one, number) => {
      const row = document.createElement("tr");
      for (const text of [number, one.state, one.running, one.waiting, share(one.kv_usage)]) {
        row.insertCell().textContent = text;
      }
      row.title = one.phase || one.failure;
      return row;
    }),
  );
}

let composed = false;

async function tick() {
  const state = byId("state");
  try {
    const stats = await fetched("/stats");
    state.textContent = stats.state;
    state.className = stats.state === "ready" ? "" : "wrong";
    for (const chart of charts) draw(chart, stats[chart.field]);
    showReplicas(stats.replicas);
    if (!composed && stats.state === "ready") {
      await compose();
      composed = true;
    }
  } catch (error) {
    state.textContent = error.message;
    state.className = "wrong";
  }
  setTimeout(tick, document.hidden ? 5000 : 500);
}

tick();
