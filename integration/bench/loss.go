//go:build linux

package main

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"time"

	"culvert.dev/connect/h3"
	"culvert.dev/tunnel"
)

// Where the far side of a path serves.
const (
	lossGateway = farHost + ":443" // SNI, connect and connect-h2 by TCP, connect-h3 by UDP
	lossPort    = farHost + ":444" // a port of one service
	lossSource  = farHost + ":445" // the service itself, by TCP and by quic-go
)

// A lossWay is how the bytes of a service cross a path, and a row of the table.
type lossWay struct {
	name    string
	control string // the sender's TCP congestion control; "" where there is no TCP
	dial    func() tunnel.Dialer
}

func lossWays() []lossWay {
	var all []lossWay
	add := func(name string, dial func() tunnel.Dialer) {
		for _, control := range []string{"reno", "cubic", "bbr"} {
			all = append(all, lossWay{name + ", " + control, control, dial})
		}
	}
	add("TCP alone", func() tunnel.Dialer { return toPort(lossSource) })
	all = append(all, lossWay{"quic-go alone", "", func() tunnel.Dialer { return toQUIC(lossSource) }})
	add("port per service", func() tunnel.Dialer { return toPort(lossPort) })
	add("connect-h2", func() tunnel.Dialer { return oneConnection(lossGateway) })
	return append(all, lossWay{"connect-h3", "", func() tunnel.Dialer {
		return &h3.Dialer{Proxy: lossGateway, TLS: toProxy(), Parallel: 1}
	}})
}

// A lossRate is a column of the table.
type lossRate struct {
	id     string
	of     int64 // of a million packets
	column string
}

var lossRates = []lossRate{
	{"lossless", 0, "none lost"},
	{"loss1000", 1000, "0.1 %"},
	{"loss10000", 10_000, "1 %"},
}

// A lossBench measures bulk through a path that loses packets.
type lossBench struct {
	*suite
	ways  []lossWay
	slice time.Duration // of one measurement: loss takes seconds to find its level
	note  string        // why nothing was measured
}

// newLoss is the part of the suite about loss, for the ways that o names.
func (s *suite) newLoss(o options) (*lossBench, error) {
	re, err := regexp.Compile(o.loss)
	if err != nil {
		return nil, fmt.Errorf("-loss: %w", err)
	}
	part := *s
	part.results = make(results)
	b := &lossBench{suite: &part, slice: 4 * s.slice}
	available, err := os.ReadFile("/proc/sys/net/ipv4/tcp_available_congestion_control")
	if err != nil {
		return nil, err
	}
	for _, w := range lossWays() {
		if re.MatchString(w.name) && (w.control == "" || slices.Contains(strings.Fields(string(available)), w.control)) {
			b.ways = append(b.ways, w)
		}
	}
	if !slices.ContainsFunc(lossRates, b.measures) {
		b.ways = nil
	}
	if len(b.ways) > 0 && os.Geteuid() != 0 {
		b.ways, b.note = nil, "not measured: network namespaces and /dev/net/tun need root"
	}
	return b, nil
}

// run measures each way at each rate. Once: the
// differences that matter are larger than those between two runs.
func (b *lossBench) run(ctx context.Context) error {
	p, err := newPath()
	if err != nil {
		return err
	}
	defer p.close()
	stop, err := b.startFar(ctx, p.far)
	if err != nil {
		return err
	}
	defer stop()
	var near *helper
	if err := p.near.do(func() (err error) { near, err = startHelper("carry"); return err }); err != nil {
		return err
	}
	defer near.stop()
	load := &generator{helper: near}
	for _, w := range b.ways {
		fmt.Fprintf(b.log, "loss: %s\n", w.name)
		if w.control != "" { // by the route: a namespace may not have every one for its default
			if err := p.far.run("ip", "route", "replace", pathPrefix, "dev", "path", "congctl", w.control); err != nil {
				return err
			}
		}
		for _, rate := range lossRates {
			if !b.measures(rate) {
				continue
			}
			p.lose(rate.of)
			r, err := load.do(ctx, job{Op: "down", N: 1, Time: b.slice, To: netip.MustParseAddrPort(lossGateway), Carrier: lossPrefix + w.name})
			p.lose(0)
			if err != nil {
				return fmt.Errorf("%s: %w", w.name, err)
			}
			if r.Errors > 0 {
				b.trouble = append(b.trouble, w.name+": "+r.Err)
			}
			b.results.add(rate.id, w.name, float64(r.Bytes)/1e6/r.Took.Seconds())
		}
	}
	return nil
}

func (b *lossBench) measures(rate lossRate) bool { return b.only.MatchString(rate.id) }

// lossPrefix stands before a way's name where a carrier's is expected.
const lossPrefix = "loss: "

// findLossWay returns the way of that name as a carrier.
func findLossWay(name string) (*carrier, error) {
	for _, w := range lossWays() {
		if w.name == name {
			return &carrier{name: name, prefix: "svc", dial: func(string) tunnel.Dialer { return w.dial() }}, nil
		}
	}
	return nil, fmt.Errorf("no such way: %q", name)
}

// startFar starts the service and a gateway at the far end, and waits for both.
func (b *lossBench) startFar(ctx context.Context, far *network) (stop func(), err error) {
	dir, err := os.MkdirTemp(b.rig.dir, "loss-")
	if err != nil {
		return nil, err
	}
	var source *helper
	if err := far.do(func() (err error) { source, err = startHelper("source"); return err }); err != nil {
		return nil, err
	}
	if _, err := source.out.ReadString('\n'); err != nil {
		source.stop()
		return nil, fmt.Errorf("the service at the far end: %w", err)
	}
	gateway, err := b.startGateway(far, dir)
	if err != nil {
		source.stop()
		return nil, err
	}
	stop = func() {
		_ = gateway.Process.Kill()
		_ = gateway.Wait()
		source.stop()
	}
	if err := awaitGateway(ctx, far); err != nil {
		stop()
		text, _ := os.ReadFile(filepath.Join(dir, "log"))
		return nil, fmt.Errorf("%w\n%s", err, text)
	}
	return stop, nil
}

func (b *lossBench) startGateway(far *network, dir string) (*exec.Cmd, error) {
	config := fmt.Sprintf(`listeners:
  - {address: %[1]s, protocols: [sni, connect, connect-h2]}
  - {address: "udp://%[1]s", tls: {certificateFile: %[2]s, keyFile: %[3]s}}
  - {address: %[4]s, service: %[5]s}
log: {level: error}
services:
  - {name: %[5]s, endpoints: ["%[6]s"]}
`, lossGateway, keyFile("bench.crt"), keyFile("bench.key"), lossPort, serviceName(0), lossSource)
	file, err := rig{dir: dir}.write("culvert.yaml", config)
	if err != nil {
		return nil, err
	}
	log, err := os.Create(filepath.Join(dir, "log"))
	if err != nil {
		return nil, err
	}
	defer log.Close()
	cmd := exec.Command(b.rig.culvert, "gateway", "--config", file)
	cmd.Stdout, cmd.Stderr = log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	return cmd, far.do(cmd.Start)
}

// awaitGateway waits until the gateway listens.
func awaitGateway(ctx context.Context, far *network) error {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	for {
		err := far.do(func() error {
			c, err := new(net.Dialer).DialContext(ctx, "tcp", lossPort)
			if err == nil {
				_ = c.Close()
			}
			return err
		})
		if err == nil {
			return nil
		}
		if pause(ctx, 20*time.Millisecond) != nil {
			return fmt.Errorf("the gateway at the far end is not ready: %w", err)
		}
	}
}

// sourceMain is the service at the far end of a path, until standard input ends.
func sourceMain() error {
	ln, err := net.Listen("tcp", lossSource)
	if err != nil {
		return err
	}
	go func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				if serveStream(c.(*net.TCPConn)) == nil {
					_, _ = io.Copy(io.Discard, c) // until the client has read all
				}
			}()
		}
	}()
	if err := serveQUIC(lossSource); err != nil {
		return err
	}
	fmt.Println("ready")
	_, err = io.Copy(io.Discard, os.Stdin)
	return err
}

const lossPreface = `
## Loss

One download for %v through a path of %v each way and %.0f MB/s, from a gateway at its far end, in MB/s. A program carries the packets between
two network namespaces one by one, and loses each with the same probability in both directions; none of them is larger than %d bytes, whatever
the kernel puts together elsewhere. TCP is measured with each congestion control that the kernel has; quic-go has one, Reno. Alone means without
a gateway. What the figures say: [adr/%s](internals/adr/%s.md).

`

const lossADR = "0013-http3-under-loss"

// report writes the part of the page that is about them.
func (b *lossBench) report(w io.Writer) {
	if b.note != "" {
		fmt.Fprintf(w, "\n## Loss\n\n%s.\n", b.note)
	}
	if len(b.ways) == 0 {
		return
	}
	fmt.Fprintf(w, lossPreface, b.slice, pathDelay, pathRate/1e6, pathMTU, lossADR[:4], lossADR)
	io.WriteString(w, "| |")
	for _, rate := range lossRates {
		fmt.Fprintf(w, " %s |", rate.column)
	}
	io.WriteString(w, "\n| --- |"+strings.Repeat(" ---: |", len(lossRates))+"\n")
	for _, way := range b.ways {
		fmt.Fprintf(w, "| %s |", way.name)
		for _, rate := range lossRates {
			cell := "-"
			if v, _, ok := b.results.median(rate.id, way.name); ok {
				cell = number(v, 2)
			}
			fmt.Fprintf(w, " %s |", cell)
		}
		io.WriteString(w, "\n")
	}
	for _, t := range b.trouble {
		fmt.Fprintf(w, "\nTROUBLE  %s\n", t)
	}
}
