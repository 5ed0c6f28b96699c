// Usage: node --experimental-websocket websocket_client.js URL NAME CA CERT KEY
// TLS to the service, in the binary messages of a WebSocket to the gateway.
const fs = require('fs');
const https = require('https');
const tls = require('tls');
const { Duplex } = require('stream');

const [url, name, ca, cert, key] = process.argv.slice(2);
const identity = { ca: fs.readFileSync(ca), cert: fs.readFileSync(cert), key: fs.readFileSync(key) };

function stream(ws) {
  const duplex = new Duplex({
    read() {},
    write(chunk, _, done) { ws.send(chunk); done(); },
    final(done) { ws.close(1000); done(); },
  });
  ws.onmessage = (e) => duplex.push(Buffer.from(e.data));
  ws.onclose = (e) => { console.log(`closed with ${e.code}`); duplex.push(null); };
  return duplex;
}

const ws = new WebSocket(`${url}${name}:443`);
ws.binaryType = 'arraybuffer';
ws.onerror = (e) => { console.error(e.message || e); process.exit(1); };
ws.onopen = () => {
  const socket = stream(ws);
  const createConnection = () => tls.connect({ ...identity, socket, servername: name });
  https.get({ createConnection, headers: { host: name, connection: 'close' }, path: '/' }, (response) => {
    let body = '';
    response.setEncoding('utf8').on('data', (s) => { body += s; }).on('end', () => {
      console.log(`websocket: ${body.trim()}`);
      ws.close(1000);
    });
  });
};
