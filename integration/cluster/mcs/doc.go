// Package mcs has two real clusters and a gateway that keeps their cluster set, for
// what the multi-cluster services API requires of an implementation.
//
// The API's own conformance suite is a module that no module proxy has, and its go.mod
// replaces the API by a folder beside it. Where its test program has been built from
// the sources,
//
//	git clone https://github.com/kubernetes-sigs/mcs-api
//	cd mcs-api/conformance && CGO_ENABLED=0 go test -c -o /tmp/mcs-conformance .
//
// $MCS_CONFORMANCE is its path, and TestConformance runs its cases that are labelled
// "Required", too.
package mcs
