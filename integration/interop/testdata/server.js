// Usage: node server.js PORT CA CERT KEY
// Tells each client the SPIFFE id in its certificate.
const fs = require('fs');
const https = require('https');

const [port, ca, cert, key] = process.argv.slice(2);
const options = { ca: fs.readFileSync(ca), cert: fs.readFileSync(cert), key: fs.readFileSync(key), requestCert: true, rejectUnauthorized: true };
https.createServer(options, (request, response) => {
  const ids = request.socket.getPeerCertificate().subjectaltname.split(', ').filter((name) => name.startsWith('URI:'));
  response.end(`you are ${ids.map((name) => name.slice(4)).join(' ')}\n`);
}).listen(Number(port), '127.0.0.1');
