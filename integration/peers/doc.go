// Package peers names the programs that reverse sessions are measured beside: frp and chisel,
// each at one version, as tools of this module. It is a module of its own: what they need is
// no concern of what is measured.
//
// "make bench" builds them as "make bin/peers" does:
//
//	go build -trimpath -o ../../bin/peers/ tool
package peers
