// What the scripts of the clients for Node share, as checks.py does for Python.

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { setTimeout as sleep } from "node:timers/promises";

export const { url, key, model, embedding_url, embedding_model } = JSON.parse(process.argv[2]);
const ENDED = ["completed", "failed", "cancelled", "expired", "ended"];
const PATIENCE_MS = 120_000, POLL_MS = 200;
const cities = ["Bonn", "Rome"];
export const ASK = [{ role: "user", content: "What is a tuple?" }];
export const asked = { messages: ASK, max_tokens: 90, temperature: 0 };
export const SCHEMA = {
  type: "object",
  properties: { city: { enum: cities, type: "string" } },
  required: ["city"],
  additionalProperties: false,
};
export const times = (count, one) => Object.fromEntries(Array.from({ length: count }, (_, i) => [`line-${i}`, one]));
export const isPlace = (found) => assert.ok(cities.includes(found?.city), JSON.stringify(found));
export const isA = (kind) => (error) => error instanceof kind;

const checks = new Map();
export const check = (name, run) => checks.set(name, run);

export async function refused(isKind, call, said = "") {
  const answer = await call().catch((error) => {
    if (!isKind(error)) throw error;
    assert.ok(error.message.includes(said), `${error.name} does not say ${said}: ${error.message}`);
    return ENDED;
  });
  assert.equal(answer, ENDED, `not refused: ${JSON.stringify(answer)}`);
}

// As check_errors of checks.py does.
export function checkErrors(ask, call, badKey, badModel) {
  check("bad call", () => refused(call, () => ask({ temperature: -1 }), "temperature"));
  check("bad key", () => refused(badKey, () => ask({ key: "sk-of-nobody" }), "key"));
  check("bad model", () => refused(badModel, () => ask({ model: "other" }), "other"));
}

export async function ended(fetch) {
  const deadline = Date.now() + PATIENCE_MS;
  for (;;) {
    const found = await fetch();
    if (ENDED.includes(found.status ?? found.processing_status)) return found;
    assert.ok(Date.now() < deadline, JSON.stringify(found));
    await sleep(POLL_MS);
  }
}

export function inPages(ids, made) {
  assert.deepEqual(ids.slice(0, made.length), made.reverse());
  assert.equal(new Set(ids).size, ids.length);
}

export async function report(name) {
  const about = readFileSync(new URL(`node_modules/${name}/package.json`, import.meta.url));
  console.log(JSON.stringify({ version: JSON.parse(about).version, checks: [...checks.keys()] }));
  for (const [check, run] of checks) {
    const why = await Promise.resolve().then(run).then(() => null, (error) => {
      console.error(error);
      return `${error.name}: ${error.message}`;
    });
    console.log(JSON.stringify({ check, why, beyond: [] }));
  }
}
