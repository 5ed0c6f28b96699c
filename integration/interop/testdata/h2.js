// Usage: node h2.js GATEWAY NAME CA CERT KEY
//
// Two tunnels on one HTTP/2 connection, each with a TLS session to the service
// inside: node's HTTP/2 is nghttp2. GATEWAY is HOST:PORT, or https://HOST:PORT for
// one that ends TLS and is shown the same certificate.
const fs = require('fs');
const http2 = require('http2');
const https = require('https');
const tls = require('tls');

const [gateway, name, ca, cert, key] = process.argv.slice(2);
const identity = { ca: fs.readFileSync(ca), cert: fs.readFileSync(cert), key: fs.readFileSync(key) };

const session = http2.connect(gateway.includes('://') ? gateway : `http://${gateway}`, identity);

function tunnel(authority) {
  return new Promise((resolve, reject) => {
    const stream = session.request({ ':method': 'CONNECT', ':authority': authority });
    stream.on('response', (headers) => resolve({ stream, headers }));
    stream.on('error', reject);
  });
}

function get(stream) {
  return new Promise((resolve, reject) => {
    const createConnection = () => tls.connect({ ...identity, socket: stream, servername: name });
    https.get({ headers: { host: name }, path: '/', createConnection }, (response) => {
      let body = '';
      response.setEncoding('utf8').on('data', (s) => { body += s; }).on('end', () => resolve(body.trim()));
    }).on('error', reject);
  });
}

async function main() {
  const open = await Promise.all([tunnel(`${name}:443`), tunnel(`${name}:443`)]);
  for (const { stream, headers } of open) console.log(`${headers[':status']} ${await get(stream)}`);
  const no = await tunnel('nobody.example.test:443');
  console.log(`${no.headers[':status']} ${no.headers['proxy-status']}`);
  session.destroy();
}

main().catch((err) => { console.error(err); process.exit(1); });
