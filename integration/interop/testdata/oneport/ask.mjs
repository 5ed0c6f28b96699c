// Usage: ask.mjs ENTRY ADDRESS: reads a page by an entry of the agent, or "direct".
import { spawn } from 'node:child_process';
import fs from 'node:fs';
import http from 'node:http';
import https from 'node:https';
import stream from 'node:stream';
import tls from 'node:tls';

const host = 'orders.shop.example';
const [entry, address] = process.argv.slice(2);
const me = { ca: fs.readFileSync('ca.pem'), cert: fs.readFileSync('me.pem'), key: fs.readFileSync('me.key'), servername: host };
const show = (page) => page.pipe(process.stdout);
const ask = (options) => https.get({ host, path: '/', createConnection: () => tls.connect({ ...me, ...options }) }, show);

switch (entry) {
  case 'direct':
    https.get(address, me, show);
    break;
  case 'connect':
    http.request({ host: '127.0.0.1', port: address, method: 'CONNECT', path: `${host}:443` }).on('connect', (answer, socket) => {
      if (answer.statusCode !== 200) throw new Error(answer.headers['proxy-status']);
      ask({ socket });
    }).end();
    break;
  case 'http':
    http.get({ host: '127.0.0.1', port: address, path: 'http://page.shop.example/', headers: { Host: 'page.shop.example' } }, show);
    break;
  case 'port':
    ask({ host: '127.0.0.1', port: address });
    break;
  case 'unix':
    ask({ path: address });
    break;
  case 'command': {
    const [program, ...args] = address.split(' ');
    const child = spawn(program, [...args, host, '443'], { stdio: ['pipe', 'pipe', 'inherit'] });
    ask({ socket: stream.Duplex.from({ readable: child.stdout, writable: child.stdin }) });
    break;
  }
}
