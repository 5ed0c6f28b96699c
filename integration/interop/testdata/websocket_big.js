// Usage: node --experimental-websocket websocket_big.js URL NAME:PORT BYTES
// One message of BYTES to a service that echoes, by the gateway.
const [url, name, bytes] = process.argv.slice(2);
const sent = new Uint8Array(Number(bytes)).map((_, i) => i * 7);
const ws = new WebSocket(`${url}${name}`);
ws.binaryType = 'arraybuffer';
ws.onerror = (e) => { console.error(e.message || e); process.exit(1); };
ws.onclose = (e) => console.log(`closed with ${e.code}`);
ws.onopen = () => ws.send(sent);
let n = 0;
ws.onmessage = (e) => {
  for (const b of new Uint8Array(e.data)) {
    if (b !== sent[n++]) { console.log(`byte ${n} differs`); process.exit(1); }
  }
  if (n === sent.length) { console.log(`echoed ${n}`); ws.close(1000); }
};
