// The dialog that uploads a file and starts a batch over it.

import { ask, errorText, uploadFile } from "./api.js";

// The first line of a file names its endpoint. A longer line is not searched for it.
const FIRST_BYTES = 1 << 20;

const percent = new Intl.NumberFormat(undefined, { style: "percent" });
const size = new Intl.NumberFormat(undefined, { maximumFractionDigits: 1 });
const $ = (id) => document.getElementById(id);

function megabytes(bytes) {
  return `${size.format(bytes / 1e6)} MB`;
}

/** The endpoint that the first line of a file names, or null. */
async function endpointOf(file) {
  const [line] = (await file.slice(0, FIRST_BYTES).text()).split("\n");
  try {
    return JSON.parse(line).url ?? null;
  } catch {
    return null;
  }
}

export class SubmitDialog {
  /**
   * @param onStarted called with the new batch
   * @param onKeyRefused called if the server does not accept the key, or requires one
   */
  constructor({ onStarted, onKeyRefused }) {
    this.onStarted = onStarted;
    this.onKeyRefused = onKeyRefused;
    this.dialog = $("submit");
    this.upload = null; // AbortController of the upload in progress
    this.uploaded = null; // {file, id} of the last upload, to start again from
    $("file").addEventListener("change", () => this.chooseEndpoint());
    $("submit-close").addEventListener("click", () => this.dialog.close());
    this.dialog.addEventListener("close", () => this.upload?.abort());
    $("submit-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.submit();
    });
  }

  open(endpoints) {
    const known = [...$("endpoint").options].map(({ value }) => value);
    if (known.join() !== endpoints.join()) {
      $("endpoint").replaceChildren(...endpoints.map((url) => new Option(url, url)));
    }
    this.showError("");
    this.dialog.showModal();
  }

  async chooseEndpoint() {
    const [file] = $("file").files;
    this.showError("");
    if (!file) return;
    const endpoint = await endpointOf(file);
    const known = [...$("endpoint").options].some(({ value }) => value === endpoint);
    if (known && file === $("file").files[0]) $("endpoint").value = endpoint;
  }

  showError(text) {
    $("submit-error").textContent = text;
    $("submit-error").hidden = text === "";
  }

  showProgress(file, share) {
    $("uploaded").value = share;
    $("uploaded-text").textContent =
      share < 1
        ? `${percent.format(share)} of ${megabytes(file.size)} uploaded`
        : "Uploaded. The server is storing the file.";
  }

  async submit() {
    if (this.upload !== null) return;
    this.showError("");
    this.upload = new AbortController();
    $("submit-start").disabled = true;
    $("submit-close").textContent = "Cancel";
    try {
      const batch = await this.start($("file").files[0]);
      if (batch !== null) {
        this.dialog.close();
        $("submit-form").reset();
        this.uploaded = null;
        this.onStarted(batch);
      }
    } catch {
      this.showError("The server does not answer. Nothing was started, as far as known.");
    } finally {
      this.upload = null;
      $("uploading").hidden = true;
      $("submit-start").disabled = false;
      $("submit-close").textContent = "Close";
    }
  }

  /** Upload the file unless it is there already, then start the batch. Null on failure. */
  async start(file) {
    if (this.uploaded?.file !== file) {
      const id = await this.uploadedId(file);
      if (id === null) return null;
      this.uploaded = { file, id };
    }
    const answer = await ask("v1/batches", {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      signal: this.upload.signal,
      body: JSON.stringify({
        input_file_id: this.uploaded.id,
        endpoint: $("endpoint").value,
        completion_window: $("window").value.trim(),
        priority: $("priority").valueAsNumber,
      }),
    });
    if (answer.ok) return answer.json();
    if (answer.status === 401 || answer.status === 403) this.refuseKey();
    else this.showError(await errorText(answer));
    return null;
  }

  async uploadedId(file) {
    this.showProgress(file, 0);
    $("uploading").hidden = false;
    const progress = (share) => this.showProgress(file, share);
    const answer = await uploadFile(file, progress, this.upload.signal);
    if (answer === null) return null;
    if (answer.status === 200) return answer.body.id;
    if (answer.status === 401 || answer.status === 403) this.refuseKey();
    else {
      const text = `The server answers with an error (${answer.status}).`;
      this.showError(answer.body?.error?.message ?? text);
    }
    return null;
  }

  refuseKey() {
    this.dialog.close();
    this.onKeyRefused();
  }
}
