//go:build linux

package main

import (
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"time"
)

// A sitesBench measures how long it takes until a service that is added at one site can be
// reached at another, which has its catalog.
type sitesBench struct {
	*suite
	sizes []int // how many services the catalog has
}

// sitesOffer is the site that offers services: n of them, and new ones that are added.
func sitesOffer(r rig, n, added int) (*exec.Cmd, error) {
	var b strings.Builder
	fmt.Fprintf(&b, `cluster: west
listeners:
  - {address: "%s", protocols: [sni]}
  - {address: "%s", protocols: [sni], tls: {key: gw, names: [%s], trust: [bench.test], protocols: [connect-h2]}}
admin: %s
log: {level: error}
limits: {maxPendingConnections: -1}
identity: {keys: {gw: {certificateFile: %s, keyFile: %s}}, trust: {bench.test: {caFile: %s}}}
peers: [{name: east, ids: ["%s"]}]
policies: [{name: east-sees, verb: catalog, action: allow, rules: [{sources: [{trustDomains: [bench.test]}]}]}]
services:
`, r.listen, apart(r.listen), quicName, r.admin, keyFile("bench.crt"), keyFile("bench.key"), keyFile("ca.crt"), identity)
	for i := range n {
		fmt.Fprintf(&b, "  - {name: %s, ports: [443], endpoints: [\"%s\"]}\n", sitesName("svc", i), r.target(i))
	}
	for i := range added {
		fmt.Fprintf(&b, "  - {name: %s, ports: [443], endpoints: [\"%s\"]}\n", sitesName("new", i), r.target(i))
	}
	next, err := r.write("west.yaml.next", b.String())
	if err != nil {
		return nil, err
	}
	path := strings.TrimSuffix(next, ".next")
	return exec.Command(r.culvert, "gateway", "--config", path), os.Rename(next, path)
}

// sitesClient is the site whose clients reach what the other one offers.
func sitesClient(r rig) (*exec.Cmd, error) {
	file, err := r.write("east.yaml", fmt.Sprintf(`cluster: east
listeners: [{address: "%s", protocols: [sni]}]
log: {level: error}
limits: {maxPendingConnections: -1}
identity: {keys: {gw: {certificateFile: %s, keyFile: %s}}, trust: {bench.test: {caFile: %s}}}
peers:
  - name: west
    gateways: [{address: "%s", transports: [{protocol: connect-h2, tls: true, key: gw, serverName: %s}]}]
    ids: ["%s"]
    zones: ["*.west.test"]
services: []
`, by(r.listen, "127.0.0.3"), keyFile("bench.crt"), keyFile("bench.key"), keyFile("ca.crt"), apart(r.listen), quicName, identity))
	return exec.Command(r.culvert, "gateway", "--config", file), err
}

func sitesName(kind string, i int) string { return fmt.Sprintf("%s-%d.west.test", kind, i) }

// newSites is the part of the suite about catalogs, for the sizes that o names.
func (s *suite) newSites(o options) (*sitesBench, error) {
	re, err := regexp.Compile(o.sites)
	if err != nil {
		return nil, fmt.Errorf("-sites: %w", err)
	}
	part := *s
	part.results = make(results)
	b := &sitesBench{suite: &part}
	for _, n := range []int{1, 1000, 9900} { // a catalog may have 10,000
		if re.MatchString(fmt.Sprint(n)) {
			b.sizes = append(b.sizes, n)
		}
	}
	return b, nil
}

// sitesAdded is how many services are added, one after the other, in a round.
const sitesAdded = 10

func (b *sitesBench) run(ctx context.Context) error {
	if len(b.sizes) == 0 {
		return nil
	}
	stop, err := b.cast()
	if err != nil {
		return err
	}
	defer stop()
	for round := range b.rounds {
		for i := range b.sizes {
			n := b.sizes[(i+round)%len(b.sizes)]
			fmt.Fprintf(b.log, "sites, round %d of %d: %d services\n", round+1, b.rounds, n)
			if err := b.measureSites(ctx, n); err != nil {
				return fmt.Errorf("sites with %d services: %w", n, err)
			}
		}
	}
	return nil
}

// measureSites starts both sites, and adds services at one of them.
func (b *sitesBench) measureSites(ctx context.Context, n int) error {
	p := &peer{
		name: "west", command: func(r rig) (*exec.Cmd, error) { return sitesOffer(r, n, 0) }, connector: sitesClient,
		ready: func(ctx context.Context, addr string) error {
			return echoThrough(ctx, by(addr, "127.0.0.3"), sitesName("svc", n-1))
		},
	}
	west, err := p.start(ctx, b.rig)
	if err != nil {
		return err
	}
	defer west.stop()
	var took []float64
	for i := range sitesAdded {
		if _, err := sitesOffer(west.rig, n, i+1); err != nil {
			return err
		}
		begin := time.Now()
		if err := west.cmd.Process.Signal(syscall.SIGHUP); err != nil {
			return err
		}
		for {
			err := echoThrough(ctx, by(west.rig.listen, "127.0.0.3"), sitesName("new", i))
			if err == nil {
				break
			}
			if time.Since(begin) > patience {
				return fmt.Errorf("the new service cannot be reached within %v: %w", patience, err)
			}
			if err := pause(ctx, time.Millisecond); err != nil {
				return err
			}
		}
		took = append(took, time.Since(begin).Seconds()*1e3)
	}
	slices.Sort(took)
	name := number(float64(n), 0)
	b.results.add("added", name, took[len(took)/2])
	b.results.add("most", name, took[len(took)-1])
	return nil
}

// sitesAim is what a service may take until it is reached at the other site, in ms.
const sitesAim = 300

// report writes the table.
func (b *sitesBench) report(w io.Writer) {
	if len(b.sizes) == 0 {
		return
	}
	fmt.Fprintf(w, `
## Sites

A site has the catalog of another one, by connect-h2 inside TLS, with so many services. There %d more are added, one after the other. The time is from
the signal to reload the file to the first byte of the service to a client of the first site. Each cell: the median of the rounds.

`, sitesAdded)
	var names []string
	for _, n := range b.sizes {
		names = append(names, number(float64(n), 0))
	}
	b.results.table(w, names, "", []row{
		{id: "added", title: "a service is added, ms, median", digit: 0},
		{id: "most", title: "a service is added, ms, most", digit: 0},
	})
	fmt.Fprint(w, "\n```\n")
	for _, name := range names {
		b.results.judgeRows(w, name, []row{{id: "added", title: "a service is added to " + name + ", ms", limit: sitesAim}})
	}
	fmt.Fprint(w, "```\n")
}
