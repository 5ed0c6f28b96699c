// Package istio holds the tests against Istio's own implementation of HBONE in
// Go: its dialer, its double dialer and its servers, with ours at the other end.
package istio
