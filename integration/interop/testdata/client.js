// Usage: node client.js GATEWAY NAME CA CERT KEY
const fs = require('fs');
const http = require('http');
const https = require('https');
const tls = require('tls');

const [gateway, name, ca, cert, key] = process.argv.slice(2);
const [host, port] = gateway.split(':');
const identity = { ca: fs.readFileSync(ca), cert: fs.readFileSync(cert), key: fs.readFileSync(key) };

function get(how, options) {
  return new Promise((resolve, reject) => {
    const request = https.get({ ...identity, headers: { host: name }, path: '/', ...options }, (response) => {
      let body = '';
      response.setEncoding('utf8').on('data', (s) => { body += s; }).on('end', () => {
        console.log(`${how}: ${body.trim()}`);
        resolve();
      });
    });
    request.on('error', reject);
  });
}

function tunnel() {
  return new Promise((resolve, reject) => {
    const request = http.request({ host, port, method: 'CONNECT', path: `${name}:443` });
    request.on('connect', (response, socket) => {
      if (response.statusCode !== 200) return reject(new Error(`CONNECT: ${response.statusCode}`));
      resolve(socket);
    });
    request.on('error', reject).end();
  });
}

async function main() {
  await get('sni', { host, port, servername: name, agent: false });
  const socket = await tunnel();
  await get('connect', { createConnection: () => tls.connect({ ...identity, socket, servername: name }) });
}

main().catch((err) => { console.error(err); process.exit(1); });
