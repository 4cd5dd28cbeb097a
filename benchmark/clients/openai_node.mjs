// OpenAI's client for Node. It has no types when it runs, so answers are checked by their use.

import assert from "node:assert/strict";
import OpenAI, { toFile } from "openai";
import * as c from "./checks.mjs";
import { check, isA, isPlace, refused } from "./checks.mjs";

const client = (base = c.url, apiKey = c.key) => new OpenAI({ baseURL: `${base}/v1`, apiKey, maxRetries: 0 });
const api = client();
const ENDPOINT = "/v1/chat/completions";
const TOOL = { name: "weather", parameters: c.SCHEMA };
const short = { messages: c.ASK, max_tokens: 8 };
const unknown = isA(OpenAI.NotFoundError);

const ask = ({ key = c.key, ...more } = {}) =>
  client(c.url, key).chat.completions.create({ model: c.model, ...c.asked, ...more });
const respond = (more) =>
  api.responses.create({ model: c.model, input: "What is a tuple?", max_output_tokens: 90, ...more });
const upload = async (content) =>
  api.files.create({ file: await toFile(Buffer.from(content), "in.jsonl"), purpose: "batch" });
const read = async (id) => (await api.files.content(id)).text();
const toLines = (bodies) =>
  Object.entries(bodies)
    .map(([id, body]) => ({ custom_id: id, method: "POST", url: ENDPOINT, body: { model: c.model, ...body } }))
    .map((line) => JSON.stringify(line) + "\n")
    .join("");
async function start(content) {
  const of = { input_file_id: (await upload(content)).id, endpoint: ENDPOINT, completion_window: "24h" };
  return (await api.batches.create(of)).id;
}
const ended = (batch) => c.ended(() => api.batches.retrieve(batch));

check("models", async () => {
  const ids = [];
  for await (const each of api.models.list()) ids.push(each.id);
  assert.deepEqual(ids, [c.model]);
  assert.equal((await api.models.retrieve(c.model)).id, c.model);
  await refused(unknown, () => api.models.retrieve("other"), "other");
});

check("chat", async () => {
  const answer = await ask({ n: 2, logprobs: true });
  assert.ok(answer.choices.length === 2 && answer.usage.completion_tokens > 0);
});

check("stream", async () => {
  const chunks = [];
  for await (const each of await ask({ stream: true, stream_options: { include_usage: true } })) chunks.push(each);
  assert.ok(chunks.some((each) => each.choices[0]?.delta?.content));
  assert.ok(chunks.at(-1).usage.completion_tokens > 0);
});

check("tools", async () => {
  const answer = await ask({ tools: [{ type: "function", function: TOOL }], tool_choice: "required" });
  isPlace(JSON.parse(answer.choices[0].message.tool_calls[0].function.arguments));
});

check("schema", async () => {
  const json_schema = { name: "place", schema: c.SCHEMA, strict: true };
  const answer = await ask({ response_format: { type: "json_schema", json_schema } });
  isPlace(JSON.parse(answer.choices[0].message.content));
});

check("embeddings", async () => {
  const call = { model: c.embedding_model, input: ["a tuple", "a list"] };
  const { data } = await client(c.embedding_url).embeddings.create(call);
  assert.deepEqual(data.map((each) => each.embedding.length), [384, 384]);
});

check("responses", async () => {
  assert.ok((await respond()).output_text);
  const kinds = [];
  for await (const event of await respond({ stream: true })) kinds.push(event.type);
  assert.match(kinds.at(-1), /response\.(completed|incomplete)/);
  const format = { type: "json_schema", name: "place", schema: c.SCHEMA, strict: true };
  isPlace(JSON.parse((await respond({ text: { format } })).output_text));
  const { output } = await respond({ tools: [{ type: "function", ...TOOL }], tool_choice: "required" });
  isPlace(JSON.parse(output.find((item) => item.type === "function_call").arguments));
  await refused(unknown, () => respond({ model: "other" }), "other");
});

check("files", async () => {
  const content = toLines({ short });
  const { id } = await upload(content);
  assert.equal((await api.files.retrieve(id)).bytes, content.length);
  assert.equal(await read(id), content);
  assert.ok((await api.files.delete(id)).deleted);
  await refused(unknown, () => api.files.content(id), id);
});

check("batch", async () => {
  const found = await ended(await start(toLines({ short, again: short, fails: { ...short, temperature: -1 } })));
  assert.deepEqual(found.request_counts, { total: 3, completed: 2, failed: 1 });
  const [output, errors] = await Promise.all([found.output_file_id, found.error_file_id].map(read));
  for (const line of output.trim().split("\n")) assert.ok(JSON.parse(line).response.body.choices[0].message.content);
  assert.equal(JSON.parse(errors).response.body.error.type, "invalid_request_error");
});

check("cancel", async () => {
  const batch = await start(toLines(c.times(10, { ...short, max_tokens: 900, ignore_eos: true })));
  await api.batches.cancel(batch);
  assert.equal((await ended(batch)).status, "cancelled");
});

check("paging", async () => {
  const made = [], ids = [];
  for (let i = 0; i < 3; i++) made.push(await start(toLines({ short })));
  for await (const each of api.batches.list({ limit: 2 })) ids.push(each.id);
  c.inPages(ids, made);
});

check("bad file", async () => {
  assert.equal((await ended(await start("not JSON\n"))).errors.data[0].line, 1);
});

check("unknown batch", () => refused(unknown, () => api.batches.retrieve("batch_none"), "batch_none"));

c.checkErrors(ask, isA(OpenAI.BadRequestError), isA(OpenAI.AuthenticationError), unknown);
await c.report("openai");
