// Calls of the server's API, with the key that the user entered.

const KEY_NAME = "sglang-batch-api-key";

let key = storedKey();

function storedKey() {
  try {
    return sessionStorage.getItem(KEY_NAME);
  } catch {
    return null; // storage is disabled: the key is kept until the page is closed
  }
}

export function hasKey() {
  return key !== null;
}

export function setKey(value) {
  key = value;
  try {
    if (value === null) sessionStorage.removeItem(KEY_NAME);
    else sessionStorage.setItem(KEY_NAME, value);
  } catch {
    // See storedKey().
  }
}

/** Headers that carry the key, if there is one. */
export function keyHeaders() {
  return key === null ? {} : { Authorization: `Bearer ${key}` };
}

/** Call the API. Paths have no leading slash: they are relative to the page's address. */
export function ask(path, { headers = {}, ...options } = {}) {
  return fetch(path, { ...options, headers: { ...headers, ...keyHeaders() }, cache: "no-store" });
}

/**
 * Upload a file of batch requests.
 *
 * @param onProgress called with the share of the file that is sent
 * @param signal of an AbortController
 * @returns {status, body}: the answer's HTTP status, and its JSON or null; null if aborted
 */
export function uploadFile(file, onProgress, signal) {
  const form = new FormData();
  form.append("purpose", "batch");
  form.append("file", file, file.name);
  // fetch() does not tell how much of a body is sent.
  const call = new XMLHttpRequest();
  return new Promise((resolve, reject) => {
    call.open("POST", "v1/files");
    call.responseType = "json";
    for (const [name, value] of Object.entries(keyHeaders())) call.setRequestHeader(name, value);
    call.upload.addEventListener("progress", ({ loaded, total }) => onProgress(loaded / total));
    call.addEventListener("load", () => resolve({ status: call.status, body: call.response }));
    call.addEventListener("error", () => reject(new Error("the upload failed")));
    call.addEventListener("abort", () => resolve(null));
    signal.addEventListener("abort", () => call.abort());
    call.send(form);
  });
}

/** The message of an error that the API answered. */
export async function errorText(answer) {
  try {
    return (await answer.json()).error.message;
  } catch {
    return `The server answers with an error (${answer.status}).`;
  }
}
