// Vercel's AI SDK, with its providers for compatible servers, for OpenAI and for Anthropic.

import assert from "node:assert/strict";
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { APICallError, Output, embedMany, generateText, jsonSchema, streamText, tool } from "ai";
import * as c from "./checks.mjs";
import { check, isPlace } from "./checks.mjs";

const compatible = (base = c.url, apiKey = c.key) =>
  createOpenAICompatible({
    name: "ours", baseURL: `${base}/v1`, apiKey, supportsStructuredOutputs: true, includeUsage: true,
  });
const openai = createOpenAI({ baseURL: `${c.url}/v1`, apiKey: c.key });
const anthropic = createAnthropic({ baseURL: `${c.url}/v1`, apiKey: c.key });
const asked = { prompt: "What is a tuple?", maxOutputTokens: 90, temperature: 0, maxRetries: 0 };
const schema = jsonSchema(c.SCHEMA);
const TOOL = { tools: { weather: tool({ inputSchema: schema }) }, toolChoice: "required" };
const fails = (status) => (error) => APICallError.isInstance(error) && error.statusCode === status;

const ask = ({ model = c.model, key = c.key, ...more } = {}) =>
  generateText({ ...asked, model: compatible(c.url, key)(model), ...more });
const of = async (model) => assert.ok((await generateText({ ...asked, model })).usage.outputTokens > 0);

async function streamed(model) {
  let text = "", failed;
  const stream = streamText({ ...asked, model, onError: ({ error }) => { failed = error; } });
  for await (const part of stream.textStream) text += part;
  if (failed) throw failed;
  assert.ok(text && (await stream.usage).outputTokens > 0);
}

check("chat", async () => {
  await ask();
  await of(openai.chat(c.model));
});

check("stream", () => streamed(compatible()(c.model)));

check("tools", async () => isPlace((await ask(TOOL)).toolCalls[0].input));

check("schema", async () => isPlace((await ask({ output: Output.object({ schema }) })).output));

check("embeddings", async () => {
  const embedder = compatible(c.embedding_url).embeddingModel(c.embedding_model);
  const { embeddings } = await embedMany({ model: embedder, values: ["a tuple", "a list"] });
  assert.deepEqual(embeddings.map((each) => each.length), [384, 384]);
});

check("responses", async () => {
  await of(openai.responses(c.model));
  await streamed(openai.responses(c.model));
  isPlace((await generateText({ ...asked, ...TOOL, model: openai.responses(c.model) })).toolCalls[0].input);
});

check("messages", async () => {
  await of(anthropic(c.model));
  await streamed(anthropic(c.model));
});

c.checkErrors(ask, fails(400), fails(401), fails(404));
await c.report("ai");
