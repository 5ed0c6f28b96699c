//go:build linux

package main

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"strings"
)

// Each proxy gets two threads, 100 names, room for 9,000 tunnels and no time
// limit that a measurement could run into.

func culvertCommand(r rig) (*exec.Cmd, error) {
	file, err := culvertConfig(r, r.routes)
	if err != nil {
		return nil, err
	}
	return exec.Command(r.culvert, "gateway", "--config", file), nil
}

// culvertConfig puts a file with so many routes in place, at once, as an
// operator would who must not have half of it read.
func culvertConfig(r rig, routes int) (path string, err error) {
	var b strings.Builder
	fmt.Fprintf(&b, `listeners:
  - address: %s
admin: %s
limits: {maxPendingConnections: -1, firstByteTimeout: 60s, handshakeTimeout: 60s}
log: {level: error}
services:
`, r.listen, r.admin)
	for i := range routes {
		fmt.Fprintf(&b, "  - name: %s\n    endpoints: [\"%s\"]\n", serviceName(i), r.target(i))
	}
	next, err := r.write("culvert.yaml.next", b.String())
	if err != nil {
		return "", err
	}
	path = strings.TrimSuffix(next, ".next")
	return path, os.Rename(next, path)
}

// haproxyCommand uses HAProxy's best configuration for this work that we
// know: splice in both directions whatever the heuristics say, with large
// pipes, and the route by a map. A pipe of 0 bytes stands for HAProxy's default.
func haproxyCommand(pipe int) func(r rig) (*exec.Cmd, error) {
	tune := ""
	if pipe > 0 {
		tune = fmt.Sprintf("tune.pipesize %d", pipe)
	}
	return func(r rig) (*exec.Cmd, error) { return haproxyWith(r, tune, "") }
}

func haproxyWith(r rig, tune, defaults string) (*exec.Cmd, error) {
	var names strings.Builder
	for i := range services {
		fmt.Fprintf(&names, "%s b%d\n", serviceName(i), i)
	}
	table, err := r.write("names.map", names.String())
	if err != nil {
		return nil, err
	}
	var b strings.Builder
	fmt.Fprintf(&b, `global
	nbthread 2
	maxconn 8500
	maxpipes 1000
	%s
defaults
	mode tcp
	option splice-auto
	option splice-request
	option splice-response
	timeout connect 5s
	timeout client 1h
	timeout server 1h
	%s
frontend sni
	bind %s
	tcp-request inspect-delay 60s
	tcp-request content accept if { req.ssl_hello_type 1 }
	use_backend %%[req.ssl_sni,lower,map(%s)]
`, tune, defaults, r.listen, table)
	for i := range services {
		fmt.Fprintf(&b, "backend b%d\n\tserver s %s\n", i, r.target(i))
	}
	file, err := r.write("haproxy.cfg", b.String())
	if err != nil {
		return nil, err
	}
	return exec.Command("haproxy", "-db", "-q", "-f", file), nil
}

const haproxyPipe = 1 << 20 // bytes; the most that a pipe may have by default

func nginxCommand(r rig) (*exec.Cmd, error) {
	var names strings.Builder
	for i := range services {
		fmt.Fprintf(&names, "\t\t%s %s;\n", serviceName(i), r.target(i))
	}
	file, err := r.write("nginx.conf", fmt.Sprintf(`load_module %s;
daemon off;
user root;
pid %s/pid;
error_log stderr error;
worker_processes 2;
worker_rlimit_nofile 20000;
events {
	worker_connections 16384;
}
stream {
	map $ssl_preread_server_name $target {
		hostnames;
%s	}
	preread_timeout 60s;
	proxy_timeout 1h;
	proxy_half_close on;
	server {
		listen %s reuseport backlog=4096;
		ssl_preread on;
		proxy_pass $target;
	}
}
`, nginxModule, r.dir, names.String(), r.listen))
	if err != nil {
		return nil, err
	}
	return exec.Command("nginx", "-p", r.dir, "-c", file), nil
}

const nginxModule = "/usr/lib/nginx/modules/ngx_stream_module.so"

func naiveCommand(r rig) (*exec.Cmd, error) { return naiveWith(r, naiveConfig{}) }

// bareCommand is the floor for bulk: the calls of splice and nothing else.
func bareCommand(r rig) (*exec.Cmd, error) { return naiveWith(r, naiveConfig{Bare: true}) }

// floorCommand is the floor for round trips.
func floorCommand(r rig) (*exec.Cmd, error) { return naiveWith(r, naiveConfig{Floor: r.target(0)}) }

func naiveWith(r rig, config naiveConfig) (*exec.Cmd, error) {
	config.Listen, config.Routes = r.listen, make(map[string]string)
	for i := range services {
		config.Routes[serviceName(i)] = r.target(i)
	}
	data, err := json.Marshal(config)
	if err != nil {
		return nil, err
	}
	file, err := r.write("naive.json", string(data))
	if err != nil {
		return nil, err
	}
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	return exec.Command(self, "-role", "naive", "-naive-config", file), nil
}
