// Package jwt verifies JSON Web Tokens as credentials of clients: those of OpenID Connect
// issuers, projected tokens of Kubernetes, JWT-SVIDs, and what load balancers sign and put
// into a field of their own.
//
//	tokens := &jwt.Tokens{Log: log}
//	err := tokens.Use([]jwt.Issuer{{URL: "https://login.example/", Audiences: []string{"culvert"}}})
//	go tokens.Run(ctx)
//	protocol := &connect.Protocol{Auth: tokens.Accept([]string{"https://login.example/"})}
//
// Keys are those of the configured issuer and no others: whatever a token says of where
// its key is (jku, x5u, jwk, x5c) is not looked at. Only signatures of RSA, ECDSA and
// Ed25519 count. A token has to name an audience and when it expires. Nothing here keeps,
// logs or quotes a token.
//
// The package is not stable yet.
package jwt
