// Package bundle exchanges trust bundles with other trust domains: SPIFFE federation. A
// Source asks the bundle endpoints of others and keeps trust of an identity.Store; a
// Handler is the bundle endpoint of this one.
//
//	src := &bundle.Source{Store: store}
//	err := src.Configure([]bundle.Endpoint{{
//		Name: "partner.example", TrustDomain: "partner.example",
//		URL: "https://bundle.partner.example/", ID: "spiffe://partner.example/bundle",
//	}})
//	err = src.Run(ctx)
//
// An endpoint proves who it is by a certificate for its host name (the profile
// https_web), or by its SPIFFE id and the bundle that it has served before (https_spiffe).
// A bad answer changes nothing: the last bundle stays.
//
// The package is not stable yet.
package bundle
