package command

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"culvert.dev/delegation"
	"culvert.dev/internal/gateway"
	"culvert.dev/registry/file"
	"culvert.dev/tunnel"
)

type explainOptions struct {
	sourceOptions
	target   string
	listener string
	proto    string
	from     string
	as       string
	actors   []string
	output   string
}

func newExplain() *cobra.Command {
	var o explainOptions
	cmd := &cobra.Command{
		Use:   "explain NAME[:PORT]",
		Short: "Show what would happen to a request: its route and endpoints, or the refusal",
		Long: `Explain decides about a request as the gateway would, without dialing, and shows
the result: the route and its endpoints in the order in which they would be
tried, or the refusal with its reason. Where policies are about the service, it
shows each step of their order, and the rule that decides with its origin. With
--from or --as it also shows what DNS answers that client, and the health of what
is there. With --admin it asks a running gateway,
otherwise it reads the configuration that a gateway would be started with.

The exit code is 0 for a route and 1 for a refusal.`,
		Example: `  culvert explain orders.example.com --listener :443 --config culvert.yaml
  culvert explain orders.example.com:443 --listener 127.0.0.1:3128 --routes routes.txt
  culvert explain orders.example.com:443 --listener :3128 --config culvert.yaml --as alice
  culvert explain db.example.com:5432 --config culvert.yaml --as spiffe://corp.example/ns/shop/sa/api --from 10.1.2.3
  culvert explain orders.example.com --listener :443 --admin 127.0.0.1:9090 -o json`,
		Args: args(1, "one NAME[:PORT]"),
		ValidArgsFunction: func(cmd *cobra.Command, a []string, _ string) ([]string, cobra.ShellCompDirective) {
			return completeNames(cmd.Context(), o.admin, o.config, a)
		},
		RunE: func(cmd *cobra.Command, a []string) error {
			o.target = a[0]
			return runExplain(cmd.Context(), cmd.OutOrStdout(), &o)
		},
	}
	o.add(cmd)
	cmd.Flag("admin").Usage = "address of a running gateway's admin port, HOST:PORT or unix:PATH"
	cmd.Flag("listen").Hidden = true
	f := cmd.Flags()
	f.StringVar(&o.listener, "listener", "", "the listener, by its address, or by its Gateway NAMESPACE/NAME")
	f.StringVar(&o.proto, "proto", "", oneOf(explainProtocols)+" (default: connect with a port, sni without)")
	f.StringVar(&o.from, "from", "", "the client's address")
	f.StringVar(&o.as, "as", "", "the verified identity of the client: a user, or a SPIFFE id")
	f.StringArrayVar(&o.actors, "actor", nil, "with --as: the identity of the client certificate beside a user or a token, or of the gateway that states the client; again for the gateways before it, the nearest first")
	_ = cmd.RegisterFlagCompletionFunc("proto", cobra.FixedCompletions(explainProtocols, cobra.ShellCompDirectiveNoFileComp))
	_ = cmd.RegisterFlagCompletionFunc("listener", func(cmd *cobra.Command, _ []string, _ string) ([]string, cobra.ShellCompDirective) {
		return completeListeners(cmd.Context(), o.admin, o.config)
	})
	addOutput(cmd, &o.output)
	return cmd
}

// allProtocols are those a request may have come by: behind postgres it is sni, and by
// reverse-pool comes none.
var allProtocols = append(slices.DeleteFunc(slices.Clone(file.Protocols), func(p string) bool { return p == "postgres" || p == "reverse-pool" }), "hbone", "connect-h3", "connect-udp", "tcp", "udp")

// explainProtocols are those that a question may be asked of by its protocol:
// ports for one service have no other.
var explainProtocols = allProtocols[:len(allProtocols)-2]

func runExplain(ctx context.Context, w io.Writer, o *explainOptions) error {
	q, err := o.query()
	if err != nil {
		return err
	}
	var x *gateway.Explanation
	if o.given() {
		x, err = explainHere(ctx, o, q)
	} else {
		x, err = explainThere(ctx, o.admin, q)
	}
	if err != nil {
		return err
	}
	if o.output == "json" {
		err = writeJSON(w, x)
	} else {
		printExplanation(w, o.target, x)
	}
	if err == nil && x.Reason != "" {
		return errSilent
	}
	return err
}

// query makes the question.
func (o *explainOptions) query() (gateway.Query, error) {
	q := gateway.Query{Host: o.target, Listener: o.listener, Proto: o.proto, As: o.as, Actors: o.actors}
	switch n := len(o.actors); {
	case n > delegation.MaxActors:
		return q, usageError("", "--actor is given %d times, and an assertion has at most %d actors", n, delegation.MaxActors)
	case slices.Contains(o.actors, ""):
		return q, usageError("write an identity, or leave it out", "--actor is empty")
	case n > 0 && o.as == "":
		return q, usageError("add --as ID, or write --as in place of --actor", "--actor is the identity beside another one, which --as names")
	}
	if host, port, err := net.SplitHostPort(o.target); err == nil {
		n, err := strconv.ParseUint(port, 10, 16)
		if err != nil || n == 0 {
			return q, usageError("", "port %q is not a number from 1 to 65535", port)
		}
		q.Host, q.Port = host, uint16(n)
	}
	if o.proto != "" && !slices.Contains(explainProtocols, o.proto) {
		return q, usageError("use "+oneOf(explainProtocols), "--proto %q", o.proto)
	}
	if o.from != "" {
		from, err := netip.ParseAddr(o.from)
		if err != nil {
			return q, usageError("write an IP address", "--from %q: %w", o.from, err)
		}
		q.From = from
	}
	return q, nil
}

// explainHere answers from the configuration a gateway would be started with.
func explainHere(ctx context.Context, o *explainOptions, q gateway.Query) (*gateway.Explanation, error) {
	r, err := newRehearsal(ctx, &o.sourceOptions)
	if err != nil {
		return nil, err
	}
	x, err := r.explain(ctx, q)
	if err != nil {
		return nil, err
	}
	x.AddResolution(namesSource(r.registry, r.config), q)
	return x, nil
}

// pickListener finds the listener that is meant.
func pickListener(c *file.Config, addr string) (string, error) {
	var all []string
	for _, l := range c.Listeners {
		if l.Address == addr {
			return addr, nil
		}
		all = append(all, l.Address)
	}
	switch {
	case addr == "" && len(all) == 1:
		return all[0], nil
	case addr == "" && len(all) > 1:
		return "", usageError("add --listener ADDR", "which listener is asked? There are %s", strings.Join(all, ", "))
	case len(all) == 0:
		return addr, nil
	}
	return "", usageError("the listeners are "+strings.Join(all, ", "), "there is no listener %q", addr)
}

// explainThere asks a running gateway.
func explainThere(ctx context.Context, addr string, q gateway.Query) (*gateway.Explanation, error) {
	c, err := askedGateway(addr)
	if err != nil {
		return nil, err
	}
	var x gateway.Explanation
	if err := c.ask(ctx, http.MethodGet, "/explain", q.Values(), &x); err != nil {
		return nil, err
	}
	return &x, nil
}

func printExplanation(w io.Writer, target string, x *gateway.Explanation) {
	fmt.Fprintf(w, "%s at listener %s by %s\n", target, x.Listener, x.Proto)
	if len(x.Actors) > 0 {
		fmt.Fprintf(w, "caller:  %s\n", printable(strings.Join(append([]string{x.Caller}, x.Actors...), ", by ")))
	}
	if x.Reason != "" {
		fmt.Fprintf(w, "%s %s\n  %s\n", bad("refused:"), x.Reason, printable(x.Detail))
		printPolicy(w, x.Policy)
		printClientView(w, x.Resolution)
		return
	}
	defer printClientView(w, x.Resolution)
	if x.Detail != "" {
		fmt.Fprintln(w, printable(x.Detail))
		return
	}
	fmt.Fprintf(w, "route:   %s, service %s, table generation %d\n", x.Pattern, x.Service, x.Generation)
	printPolicy(w, x.Policy)
	if l := x.Limits; l != nil {
		fmt.Fprintf(w, "limits:  %s\n", describeLimits(l))
	}
	var common []string // what all endpoints are reached over
	if len(x.Endpoints) > 0 && !slices.ContainsFunc(x.Endpoints, func(ep gateway.ExplanationEndpoint) bool { return !slices.Equal(ep.Via, x.Endpoints[0].Via) }) {
		common = x.Endpoints[0].Via
	}
	for _, hop := range common {
		fmt.Fprintf(w, "via:     %s\n", hop)
	}
	if b := x.Balancing; b != nil {
		fmt.Fprintf(w, "choice:  %s%s\n", b.Policy, balancingNote(b))
	}
	for i, ep := range x.Endpoints {
		note := ""
		if ep.Weight > 0 {
			note += fmt.Sprintf(", weight %d", ep.Weight)
		}
		if ep.Tunnels != nil {
			note += fmt.Sprintf(", tunnels %d", *ep.Tunnels)
		}
		if ep.Security != "" {
			note += ", transport " + ep.Security
			if common == nil && len(ep.Via) > 0 {
				note += " over " + strings.Join(ep.Via, ", ")
			}
		}
		if ep.Why != "" {
			note += ": " + ep.Why
		}
		if ep.Identity != "" {
			note += "\n     it is told who the client is " + printable(ep.Identity)
		}
		if ep.OwnTLS {
			note += "\n     a client that begins TLS has its own with the endpoint; the gateway speaks TLS for others"
		}
		if ep.Problem != "" {
			note += "  would be refused: " + ep.Problem
		}
		if ep.TLSOnly != "" {
			note += fmt.Sprintf("\n     TLS alone is carried, and plaintext is refused with %s: %s", tunnel.Insecure, printable(ep.TLSOnly))
		}
		if ep.Insecure {
			note += "\n     plaintext is carried without the protection of mutual TLS: insecure: true permits it"
		}
		fmt.Fprintf(w, "  %d. %s%s\n", i+1, ep.Address, note)
	}
}

// printPolicy prints what policies decide, step by step.
func printPolicy(w io.Writer, p *gateway.ExplanationPolicy) {
	if p == nil {
		return
	}
	fmt.Fprintf(w, "policy:  %s\n", describeDecision(&p.PolicyDecision))
	var rows [][]string
	for i, s := range p.Steps {
		matched := "none matches"
		switch {
		case s.Policies == 0:
			matched = "-"
		case s.Match != "":
			matched = fmt.Sprintf("%s, rule %d", s.Match, s.Rule)
		}
		result := s.Result
		if s.Why != "" {
			result = "left out: " + s.Why
		}
		rows = append(rows, []string{fmt.Sprintf("  %d. %s", i+1, s.Step), fmt.Sprintf("%d selected", s.Policies), printable(matched), result})
	}
	_ = writeTable(w, rows)
	if p.Admitted < p.Endpoints {
		fmt.Fprintf(w, "  admitted to %d of %d endpoints\n", p.Admitted, p.Endpoints)
	}
	if p.DryRun != nil {
		fmt.Fprintf(w, "dry run: %s\n", describeDecision(p.DryRun))
	}
}

// describeDecision says which policy has decided, and where it is written.
func describeDecision(d *gateway.PolicyDecision) string {
	word, how := "denied", "which allows others only"
	if d.Allowed {
		word = "allowed"
	}
	if d.Rule > 0 {
		how = fmt.Sprintf("rule %d", d.Rule)
	}
	if d.Policy == "" {
		return word + ": no policy decides"
	}
	return printable(fmt.Sprintf("%s by %s of %s, %s", word, d.Policy, d.Origin, how))
}

// printClientView prints what DNS answers the client, and the health of what is there.
func printClientView(w io.Writer, r *gateway.Resolution) {
	if r == nil {
		return
	}
	fmt.Fprintln(w)
	_ = printResolution(w, r)
}

// describeLimits says what of the limits of a service is in use.
func describeLimits(l *gateway.StatusLimit) string {
	var parts []string
	if l.MaxConnections > 0 {
		parts = append(parts, fmt.Sprintf("%d of %d connections", l.Connections, l.MaxConnections))
	}
	if l.MaxPerEndpoint > 0 {
		parts = append(parts, fmt.Sprintf("%d connections for each endpoint", l.MaxPerEndpoint))
	}
	if l.NewPerSecond > 0 {
		parts = append(parts, fmt.Sprintf("%d new ones a second", l.NewPerSecond))
	}
	return strings.Join(parts, ", ")
}

// balancingNote says what counts beside the policy.
func balancingNote(b *gateway.ExplanationBalancing) (note string) {
	if b.Client != "" {
		note += ", client " + b.Client
	}
	if b.StickyFor != "" {
		note += ", which keeps its endpoint for " + b.StickyFor
	}
	if b.Zone != "" {
		note += ", zone " + b.Zone
	}
	return note
}
