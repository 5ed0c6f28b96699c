// Signs, and verifies, tokens by jose: jose.mjs MODULES DIR. It writes DIR/jwks.json, and
// DIR/ALG.pem for the keys that HAProxy reads, and prints a JSON list of {name, token, good},
// where good says whether jose accepts the token.
import { writeFileSync } from "node:fs";
import { join } from "node:path";
import { pathToFileURL } from "node:url";

const [modules, dir] = process.argv.slice(2);
const jose = await import(pathToFileURL(join(modules, "jose/dist/webapi/index.js")));

const issuer = "https://login.example.test/", audience = "culvert";
const algorithms = ["RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA"];
const now = Math.floor(Date.now() / 1000);
const pairs = {}, keys = [];
const rsa = await jose.generateKeyPair("RS256", { extractable: true }); // one for all: they take a while to make
const as = async (alg) => ({
  privateKey: await jose.importJWK(await jose.exportJWK(rsa.privateKey), alg),
  publicKey: await jose.importJWK(await jose.exportJWK(rsa.publicKey), alg, { extractable: true }),
});
for (const alg of algorithms) {
  const pair = /^[RP]S/.test(alg) ? await as(alg) : await jose.generateKeyPair(alg, { extractable: true });
  pairs[alg] = pair;
  keys.push({ ...(await jose.exportJWK(pair.publicKey)), kid: alg, alg, use: "sig" });
  writeFileSync(join(dir, `${alg}.pem`), await jose.exportSPKI(pair.publicKey), { mode: 0o600 });
}
writeFileSync(join(dir, "jwks.json"), JSON.stringify({ keys }), { mode: 0o600 });
const set = jose.createLocalJWKSet({ keys });
const stranger = await jose.generateKeyPair("ES256", { extractable: true });

const claims = { iss: issuer, aud: audience, sub: "alice", iat: now, exp: now + 3600 };
const sign = (more = {}, header = {}, key) => {
  const all = { alg: "ES256", ...header };
  all.kid ??= all.alg;
  const payload = { ...claims, ...more };
  for (const name of Object.keys(payload)) if (payload[name] === undefined) delete payload[name];
  return new jose.CompactSign(new TextEncoder().encode(JSON.stringify(payload))).setProtectedHeader(all).sign(key ?? pairs[all.alg].privateKey);
};
const spki = await jose.exportSPKI(pairs.RS256.publicKey);
const bytes = (text) => new TextEncoder().encode(text);
const good = await sign();
const [head, body, signature] = good.split(".");

const rows = {};
for (const alg of algorithms) rows[`good ${alg}`] = await sign({}, { alg });
Object.assign(rows, {
  "good, several audiences": await sign({ aud: ["billing", audience] }),
  "good, type at+jwt": await sign({}, { typ: "at+jwt" }),
  "good, clock behind": await sign({ nbf: now + 30, iat: now + 30 }),
  "alg none": new jose.UnsecuredJWT(claims).encode(),
  "shared secret": await sign({}, { alg: "HS256", kid: "ES256" }, bytes("a shared secret of thirty-two bytes")),
  "public key as shared secret": await sign({}, { alg: "HS256", kid: "RS256" }, bytes(spki)),
  "algorithm of another key": await sign({}, { alg: "RS256", kid: "ES256" }),
  "PS256 by the key of RS256": await sign({}, { alg: "PS256", kid: "RS256" }),
  "key of another kid": await sign({}, {}, stranger.privateKey),
  "signature of another token": `${head}.${(await sign({ sub: "admin" })).split(".")[1]}.${signature}`,
  "no signature": `${head}.${body}.`,
  "embedded key": await sign({}, { jwk: await jose.exportJWK(stranger.publicKey) }, stranger.privateKey),
  "jku": await sign({}, { kid: "mine", jku: "https://evil.example/keys" }, stranger.privateKey),
  "x5u": await sign({}, { kid: "mine", x5u: "https://evil.example/cert" }, stranger.privateKey),
  "kid that is a path": await sign({}, { kid: "../../../../dev/null" }),
  "kid that is a URL": await sign({}, { kid: "https://evil.example/key" }),
  "type of a logout token": await sign({}, { typ: "logout+jwt" }),
  "nested": await sign({}, { cty: "JWT" }),
  "encrypted": await new jose.EncryptJWT(claims).setProtectedHeader({ alg: "dir", enc: "A256GCM" }).encrypt(new Uint8Array(32)),
  "over 16 KiB": await sign({ padding: "x".repeat(16 << 10) }),
  "exp missing": await sign({ exp: undefined }),
  "exp text": await sign({ exp: "tomorrow" }),
  "expired": await sign({ exp: now - 120 }),
  "nbf ahead": await sign({ nbf: now + 600 }),
  "iat ahead": await sign({ iat: now + 600 }),
  "aud missing": await sign({ aud: undefined }),
  "aud of another": await sign({ aud: ["billing", "culvert2"] }),
  "issuer unknown": await sign({ iss: "https://evil.example/" }),
  "issuer without its slash": await sign({ iss: "https://login.example.test" }),
  "issuer missing": await sign({ iss: undefined }),
  "sub missing": await sign({ sub: undefined }),
  "sub a SPIFFE id": await sign({ sub: "spiffe://corp.example/ns/a/sa/b" }),
  "not a token": "opaque",
});

const out = [];
for (const [name, token] of Object.entries(rows)) {
  let good = true;
  try {
    await jose.jwtVerify(token, set, { issuer, audience, algorithms, clockTolerance: 60, requiredClaims: ["exp", "sub"] });
  } catch {
    good = false;
  }
  out.push({ name, token, good });
}
console.log(JSON.stringify(out));
