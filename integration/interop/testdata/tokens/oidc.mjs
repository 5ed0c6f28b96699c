// An OpenID Connect issuer at https://localhost:PORT, of oidc-provider:
// oidc.mjs MODULES PORT CERT KEY KID. Its key with that kid is made anew at each start.
import { createServer } from "node:https";
import { generateKeyPairSync } from "node:crypto";
import { readFileSync } from "node:fs";
import { join } from "node:path";
import { pathToFileURL } from "node:url";

const [modules, port, cert, key, kid] = process.argv.slice(2);
const { default: Provider } = await import(pathToFileURL(join(modules, "oidc-provider/lib/index.js")));

const { privateKey } = generateKeyPairSync("ec", { namedCurve: "P-256" });
const issuer = `https://localhost:${port}`;
const provider = new Provider(issuer, {
  jwks: { keys: [{ ...privateKey.export({ format: "jwk" }), kid, alg: "ES256", use: "sig" }] },
  clients: [{
    client_id: "ci", client_secret: "a secret of the test", grant_types: ["client_credentials"], redirect_uris: [], response_types: [],
    token_endpoint_auth_method: "client_secret_post", id_token_signed_response_alg: "ES256",
  }],
  features: {
    devInteractions: { enabled: false },
    clientCredentials: { enabled: true },
    resourceIndicators: {
      enabled: true,
      defaultResource: () => "urn:culvert",
      getResourceServerInfo: () => ({ scope: "", audience: "culvert", accessTokenTTL: 600, accessTokenFormat: "jwt", jwt: { sign: { alg: "ES256" } } }),
    },
  },
});
createServer({ cert: readFileSync(cert), key: readFileSync(key) }, provider.callback()).listen(Number(port), "127.0.0.1", () => console.log("serving"));
