// Package identity knows who is who: the keys that this gateway shows, the bundles that
// it verifies others by, and whom a chain of certificates names.
//
// Keys and bundles have names, under which listeners and next hops refer to them. A
// bundle belongs to one trust domain, so that no CA can speak for the domain of another.
//
// The package is not stable yet.
package identity
