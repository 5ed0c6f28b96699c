package command

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/spf13/cobra"

	"culvert.dev/internal/gateway/upstream"
	"culvert.dev/registry"
	"culvert.dev/registry/file"
	"culvert.dev/tunnel"
)

type doctorOptions struct {
	agent   agentFlags
	config  string
	timeout time.Duration
	output  string
}

func newDoctor() *cobra.Command {
	var o doctorOptions
	cmd := &cobra.Command{
		Use:   "doctor",
		Short: "Find out why this machine can't reach gateways",
		Long: `Doctor checks what culvert needs on this machine and on the way to its gateways:
the files of keys and CAs, the clock, DNS, each carrier to each gateway, captive
portals, packets that are lost for their size, rules of others in nftables, user
namespaces, ports that other programs have, and whether the resolver of this machine
asks the agent for its names. It prints a sentence for each, and what to do about what
is wrong.

It looks at the flags of culvert agent, at a configuration file, or at what culvert
join has left on this machine. It changes nothing, and sends nothing to a service.
The exit code is 1 if something has to be fixed, and 0 if there are warnings.`,
		Example: `  culvert doctor
  culvert doctor --gateway gw.example --cert me.pem --key me.key --ca ca.pem
  culvert doctor --config agent.yaml
  culvert doctor -o json | jq -r '.checks[] | select(.state == "failed").remedy'`,
		Args:              args(0, "no arguments"),
		ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return runDoctor(cmd.Context(), cmd.OutOrStdout(), &o)
		},
	}
	f := cmd.Flags()
	f.StringVar(&o.config, "config", "", "configuration file, YAML, in place of the flags below")
	o.agent.addGateway(cmd)
	f.StringVar(&o.agent.proxy, "proxy", "", "where programs ask the agent: HOST:PORT on loopback, or unix:PATH (default: 127.0.0.1:1080)")
	f.DurationVar(&o.timeout, "timeout", 30*time.Second, "time limit of all checks")
	addOutput(cmd, &o.output)
	return cmd
}

// States of a check.
const (
	checkOK      = "ok"
	checkWarning = "warning" // it works, and may be slower or less than it could be
	checkFailed  = "failed"
	checkSkipped = "skipped" // it could not be found out, for the reason in the sentence
)

// A doctorCheck is one thing that was looked at.
type doctorCheck struct {
	Check  string `json:"check"` // one word
	Of     string `json:"of,omitempty"`
	State  string `json:"state"`
	Text   string `json:"text"`             // one sentence
	Remedy string `json:"remedy,omitempty"` // what to do
}

// A doctorReport is what "culvert doctor -o json" prints.
type doctorReport struct {
	Checks   []doctorCheck `json:"checks"`
	Failed   int           `json:"failed"`
	Warnings int           `json:"warnings"`
	Duration string        `json:"duration"`
}

// A doctor makes a report. What it asks of the machine is replaced in tests.
type doctor struct {
	lookup func(ctx context.Context, host string) ([]string, error)
	ask    func(ctx context.Context, server, host string) ([]netip.Addr, error) // a DNS server
	root   string                                                               // of /proc and /sys
	nft    func(ctx context.Context) ([]byte, error)
	now    func() time.Time

	began func(check string) // what is being looked at. May be nil

	mu     sync.Mutex // guards report
	report doctorReport
}

func newDoctorOf() *doctor {
	return &doctor{lookup: net.DefaultResolver.LookupHost, ask: askDNS, root: "/", nft: listRules, now: time.Now}
}

func (d *doctor) add(check, of, state, remedy, format string, args ...any) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.report.Checks = append(d.report.Checks, doctorCheck{check, of, state, fmt.Sprintf(format, args...), remedy})
}

func (d *doctor) begin(check string) {
	if d.began != nil {
		d.began(check)
	}
}

func runDoctor(ctx context.Context, w io.Writer, o *doctorOptions) error {
	d := newDoctorOf()
	clear := ""
	if c, ok := w.(*cleanWriter); ok && isTerminal(c.w) && o.output != "json" {
		clear = string(markLine)
		d.began = func(check string) { fmt.Fprintf(w, "%slooking at %s ...", clear, check) }
	}
	ctx, cancel := context.WithTimeout(ctx, o.timeout)
	defer cancel()
	start := time.Now()
	d.examine(ctx, o)
	d.report.Duration = time.Since(start).Round(time.Millisecond).String()
	fmt.Fprint(w, clear)
	if o.output == "json" {
		if err := writeJSON(w, &d.report); err != nil {
			return err
		}
	} else {
		d.report.print(w)
	}
	if d.report.Failed > 0 {
		return errSilent
	}
	return nil
}

func (r *doctorReport) print(w io.Writer) {
	for i := range r.Checks {
		c := &r.Checks[i]
		word := map[string]string{checkOK: good("ok"), checkWarning: doubtful("warning"), checkFailed: bad("failed"), checkSkipped: "skipped"}[c.State]
		fmt.Fprintf(w, "%s %s %s\n", padded(word, 8, false), padded(c.Check, 10, false), printable(c.Text))
		if c.Remedy != "" {
			fmt.Fprintf(w, "%s what to do: %s\n", padded("", 19, false), printable(c.Remedy))
		}
	}
	switch {
	case r.Failed > 0:
		fmt.Fprintf(w, "%s, %s, after %s\n", bad(plural(r.Failed, "fault")), plural(r.Warnings, "warning"), r.Duration)
	case r.Warnings > 0:
		fmt.Fprintf(w, "%s, after %s\n", doubtful(plural(r.Warnings, "warning")), r.Duration)
	default:
		fmt.Fprintf(w, "%s, after %s\n", good("nothing is wrong"), r.Duration)
	}
}

// examine looks at everything.
func (d *doctor) examine(ctx context.Context, o *doctorOptions) {
	d.begin("the configuration")
	c, err := o.load()
	if err != nil {
		d.mistakes(err)
	} else {
		d.gateways(ctx, c)
		d.begin("ports")
		d.ports(c)
		d.begin("names")
		d.names(ctx, c)
	}
	d.begin("nftables")
	d.rules(ctx)
	d.begin("user namespaces")
	d.namespaces()
	for i := range d.report.Checks {
		switch d.report.Checks[i].State {
		case checkFailed:
			d.report.Failed++
		case checkWarning:
			d.report.Warnings++
		}
	}
}

// load returns the configuration of a file, of flags, or of a device that has joined.
func (o *doctorOptions) load() (*file.Config, error) {
	if o.config != "" {
		return file.Load(o.config)
	}
	return o.agent.load()
}

// keyMismatch is what crypto/tls says of a key that is not that of a certificate.
const (
	keyMismatch    = "private key does not match"
	mismatchRemedy = "take the key and the certificate that were made together"
)

// mistakes reports what is wrong with a configuration that can't be used.
func (d *doctor) mistakes(err error) {
	var all file.Errors
	if !errors.As(err, &all) {
		hint := "see \"culvert doctor --help\""
		var ce *cliError
		if errors.As(err, &ce) && ce.hint != "" {
			hint = ce.hint
		}
		if strings.Contains(err.Error(), keyMismatch) {
			d.add("key", "", checkFailed, mismatchRemedy, "the private key does not belong to the certificate: %s", err)
			return
		}
		d.add("config", "", checkFailed, hint, "there is no usable configuration: %s", err)
		return
	}
	for _, e := range all {
		check, hint := "config", e.Hint
		if strings.Contains(e.Msg, keyMismatch) {
			check, hint = "key", mismatchRemedy
		}
		d.add(check, e.File, checkFailed, cmp.Or(hint, "fix the configuration; \"culvert config check FILE\" says the same"), "%s", e.Error())
	}
}

// A doctorGateway is a gateway with the carriers to it.
type doctorGateway struct {
	address string // host:port
	hops    []registry.Hop
}

// gatewaysOf returns the gateways of c.
func gatewaysOf(c *file.Config) (all []doctorGateway) {
	add := func(address string, hop registry.Hop) {
		if hop.Proto == "" || hop.Proto == "sni" || hop.Proto == "quic" {
			return
		}
		at := slices.IndexFunc(all, func(g doctorGateway) bool { return g.address == address })
		if at < 0 {
			all = append(all, doctorGateway{address: address})
			at = len(all) - 1
		}
		if !slices.ContainsFunc(all[at].hops, func(h registry.Hop) bool { return h.Proto == hop.Proto }) {
			all[at].hops = append(all[at].hops, hop)
		}
	}
	for i := range c.Networks {
		for j := range c.Networks[i].Gateways {
			g := &c.Networks[i].Gateways[j]
			to := g.AddressFrom(c.Networks[i].Name, c.Mesh.Network)
			for k := range g.Transports {
				add(to.String(), g.Transports[k].At(to))
			}
		}
	}
	if c.Reverse != nil {
		for _, h := range c.Reverse.Gateways {
			for _, a := range h.Addresses {
				one := h
				one.Addresses = []string{a}
				add(bareAddress(a), one)
			}
		}
	}
	return all
}

// bareAddress returns host:port of an address that may be a URL.
func bareAddress(a string) string {
	if _, rest, ok := strings.Cut(a, "://"); ok {
		a, _, _ = strings.Cut(rest, "/")
	}
	return a
}

// gateways looks at keys, the clock and the way to each gateway.
func (d *doctor) gateways(ctx context.Context, c *file.Config) {
	log := slog.New(slog.DiscardHandler)
	own := *identityOf(c)
	own.Joined, own.ServeBundle = "", nil // nothing is renewed or served here
	ids, err := newIdentities(ctx, &own, tunnel.Sockets{}, log)
	if err != nil {
		d.add("key", "", checkFailed, "fix identity in the configuration", "the keys can't be used: %s", err)
		return
	}
	defer ids.close()
	(&credentials{store: ids.store, log: log}).use(c.Credentials)
	d.begin("keys and the clock")
	d.keys(ids.store, c)
	all := gatewaysOf(c)
	if len(all) == 0 {
		d.add("gateway", "", checkSkipped, "", "the configuration has no gateway that this machine connects to")
	}
	transports := &upstream.Transports{Direct: &tunnel.NetDialer{Guard: &tunnel.Guard{}}, Identity: ids.store, JWTSVID: ids.jwtSVID, Log: log}
	cfg := new(settingsOnly)
	transports.Lookup, transports.ReadFile = cfg.lookup, cfg.readFile
	defer transports.Close()
	if err := transports.UseProxy(upstreamProxy(c)); err != nil {
		d.add("proxy", "", checkFailed, "correct upstreamProxy", "the upstream proxy can't be used: %s", err)
		return
	}
	for i := range all {
		d.begin("the gateway " + all[i].address)
		d.gateway(ctx, transports, &all[i], ids.store)
	}
}

func identityOf(c *file.Config) *file.Identity {
	if c.Identity == nil {
		return &file.Identity{}
	}
	return c.Identity
}
