//go:build linux

package main

import (
	"fmt"
	"os/exec"
)

// twoHops are two HAProxies in a row that splice: what two programs between a client and a service
// cost where each client has a connection of its own and nothing is encrypted, named or limited.
// They reach nothing that hides behind a NAT. The one next to the service is the first to start.
func twoHops(r rig) (*exec.Cmd, error) {
	return haproxyHop(r, "service.cfg", apart(r.listen), r.target(0))
}

func firstHop(r rig) (*exec.Cmd, error) {
	return haproxyHop(r, "client.cfg", r.listen, apart(r.listen))
}

func haproxyHop(r rig, name, listen, to string) (*exec.Cmd, error) {
	file, err := r.write(name, fmt.Sprintf(`global
	nbthread 2
	maxconn 1000
	tune.pipesize %d
defaults
	mode tcp
	option splice-auto
	option splice-request
	option splice-response
	timeout connect 5s
	timeout client 1h
	timeout server 1h
listen hop
	bind %s
	server s %s
`, haproxyPipe, listen, to))
	if err != nil {
		return nil, err
	}
	return exec.Command("haproxy", "-db", "-q", "-f", file), nil
}
