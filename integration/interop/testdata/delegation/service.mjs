// A service behind a gateway that ends the clients' TLS: service.mjs MODULES PORT CA CERT KEY
// AUDIENCE GATEWAY. It tells each caller who it is and through which gateways it came, as jose
// and node's TLS have verified it, and writes why it refuses one.
import { once } from "node:events";
import { readFileSync } from "node:fs";
import { join } from "node:path";
import { createServer } from "node:tls";
import { pathToFileURL } from "node:url";

const [modules, port, ca, cert, key, audience, gateway] = process.argv.slice(2);
const { jwtVerify } = await import(pathToFileURL(join(modules, "jose/dist/webapi/index.js")));

// take reads n bytes, and not one more.
async function take(socket, n) {
  const limit = AbortSignal.timeout(10_000);
  let have = Buffer.alloc(0);
  while (have.length < n) {
    const b = socket.read(); // read(n) would not wait for the rest: "readable" comes again at once while some is left
    if (b) have = Buffer.concat([have, b]);
    else if (socket.readableEnded || socket.destroyed) throw new Error("the PROXY header is cut short");
    else await once(socket, "readable", { signal: limit });
  }
  if (have.length > n) socket.unshift(have.subarray(n));
  return have.subarray(0, n);
}

// assertion reads a PROXY header of version 2, and returns its value 0xE1.
async function assertion(socket) {
  const head = await take(socket, 16);
  if (head.toString("latin1", 0, 12) !== "\r\n\r\n\0\r\nQUIT\n") throw new Error("no PROXY header of version 2");
  const length = head.readUInt16BE(14);
  if (length > 4096) throw new Error("the PROXY header is too large");
  const body = await take(socket, length);
  if (head[12] === 0x20) return null; // LOCAL: a health check of the gateway
  const addresses = { 0x00: 0, 0x11: 12, 0x21: 36, 0x31: 216 }[head[13]];
  if (head[12] !== 0x21 || addresses === undefined) throw new Error("the PROXY header is malformed");
  let found;
  for (let at = addresses; at < length;) {
    if (at + 3 > length || at + 3 + body.readUInt16BE(at + 1) > length) throw new Error("a value of the PROXY header overruns it");
    const value = body.subarray(at + 3, at + 3 + body.readUInt16BE(at + 1));
    if (body[at] === 0xe1 && found !== undefined) throw new Error("there are two assertions");
    if (body[at] === 0xe1) found = value.toString("latin1");
    at += 3 + value.length;
  }
  if (!found) throw new Error("there is no assertion");
  return found;
}

// caller verifies who calls.
async function caller(socket) {
  // Node has verified the certificate. It must be the gateway's, and the key must be that of it.
  const shown = socket.getPeerX509Certificate();
  const names = (shown.subjectAltName ?? "").split(", ").filter((name) => name.startsWith("URI:"));
  if (names.length !== 1 || names[0] !== `URI:${gateway}`) throw new Error(`${names} is not the gateway`);
  const token = await assertion(socket);
  if (token === null) return null;
  const { payload } = await jwtVerify(token, shown.publicKey, {
    algorithms: ["ES256", "ES384", "ES512", "PS256", "EdDSA"], typ: "culvert-peer+jwt",
    issuer: gateway, audience, clockTolerance: 5, maxTokenAge: 60, requiredClaims: ["sub", "exp", "jti", "tls-exporter", "act"],
  });
  const exporter = socket.exportKeyingMaterial(32, "EXPORTER-Channel-Binding", Buffer.alloc(0)).toString("base64url");
  if (payload["tls-exporter"] !== exporter) throw new Error("the assertion is of another TLS session");
  const actors = [];
  for (let act = payload.act; act; act = act.act) actors.push(act.sub);
  if (actors.length > 4 || actors[0] !== gateway) throw new Error("the actors are wrong");
  return `${payload.sub} by ${payload.method} through [${actors.join(" ")}]`;
}

const tls = { ca: readFileSync(ca), cert: readFileSync(cert), key: readFileSync(key), requestCert: true, rejectUnauthorized: true, minVersion: "TLSv1.3" };
createServer(tls, async (socket) => {
  socket.on("error", () => socket.destroy());
  try {
    const who = await caller(socket);
    socket.end(who === null ? "" : `${who}\n`);
  } catch (err) {
    console.error(`refused: ${err.message}`);
    socket.destroy();
  }
}).listen(Number(port), "127.0.0.1", () => console.log("listening"));
