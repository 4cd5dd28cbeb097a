// Anthropic's client for Node.

import assert from "node:assert/strict";
import Anthropic from "@anthropic-ai/sdk";
import * as c from "./checks.mjs";
import { check, isA, isPlace, refused } from "./checks.mjs";

const client = (apiKey = c.key) => new Anthropic({ baseURL: c.url, apiKey, maxRetries: 0 }).messages;
const api = client();
const asked = { model: c.model, messages: c.ASK, max_tokens: 90 };
const TOOL = { tools: [{ name: "weather", input_schema: c.SCHEMA }], tool_choice: { type: "any" } };
const unknown = isA(Anthropic.NotFoundError);

const ask = ({ key = c.key, ...more } = {}) => client(key).create({ ...asked, ...more });
async function start(bodies) {
  const lines = Object.entries(bodies).map(([id, body]) => ({ custom_id: id, params: { ...asked, ...body } }));
  return (await api.batches.create({ requests: lines })).id;
}
const ended = (batch) => c.ended(() => api.batches.retrieve(batch));

check("messages", async () => {
  assert.ok((await ask()).usage.output_tokens > 0);
});

check("stream", async () => {
  let text = "";
  const stream = api.stream(asked).on("text", (part) => (text += part));
  assert.ok((await stream.finalMessage()).usage.output_tokens > 0 && text);
});

check("tools", async () => {
  isPlace((await ask(TOOL)).content.find((block) => block.type === "tool_use").input);
});

check("schema", async () => {
  const format = { type: "json_schema", schema: c.SCHEMA };
  isPlace(JSON.parse((await ask({ output_config: { format } })).content[0].text));
});

check("message batches", async () => {
  const batch = await start({ plain: {}, tool: TOOL, fails: { top_p: 7 } });
  await ended(batch);
  const results = [];
  for await (const each of await api.batches.results(batch)) results.push(each.result.type);
  assert.deepEqual(results, ["succeeded", "succeeded", "errored"]);
  assert.equal((await api.batches.delete(batch)).id, batch);
});

check("cancel", async () => {
  const batch = await start(c.times(40, { max_tokens: 900 }));
  await api.batches.cancel(batch);
  assert.ok((await ended(batch)).request_counts.canceled > 0);
});

check("paging", async () => {
  const made = [], ids = [];
  for (let i = 0; i < 3; i++) made.push(await start({ plain: {} }));
  for await (const each of api.batches.list({ limit: 2 })) ids.push(each.id);
  c.inPages(ids, made);
});

check("unknown batch", () => refused(unknown, () => api.batches.retrieve("batch_none"), "batch_none"));

c.checkErrors(ask, isA(Anthropic.BadRequestError), isA(Anthropic.AuthenticationError), unknown);
await c.report("@anthropic-ai/sdk");
