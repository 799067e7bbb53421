/** As much of browsers' XMLHttpRequest as grpc-web uses, on Node's fetch; text comes in pieces. */
export class Request {
  readyState = 0;
  status = 0;
  statusText = "";
  responseType = "";
  responseText = "";
  response = null;
  #headers = {};
  #got = new Headers();
  #aborter = new AbortController();

  open(method, url) {
    Object.assign(this, { method, url });
  }

  setRequestHeader(name, value) {
    this.#headers[name] = value;
  }

  getResponseHeader(name) {
    return this.#got.get(name);
  }

  getAllResponseHeaders() {
    return [...this.#got].map(([name, value]) => `${name}: ${value}\r\n`).join("");
  }

  abort() {
    this.#aborter.abort();
  }

  async send(body) {
    try {
      const { method } = this;
      const got = await fetch(this.url, { method, body, headers: this.#headers, signal: this.#aborter.signal });
      this.#got = got.headers;
      this.status = got.status;
      if (this.responseType === "arraybuffer") this.response = await got.arrayBuffer();
      else for await (const piece of got.body.pipeThrough(new TextDecoderStream())) this.#loaded(piece);
    } catch {
      this.status = 0;
    }
    this.#become(4);
  }

  #loaded(piece) {
    this.responseText += piece;
    this.#become(3);
  }

  #become(state) {
    this.readyState = state;
    this.onreadystatechange?.();
  }
}
