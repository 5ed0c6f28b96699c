package command

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/netip"
	"strconv"

	"github.com/spf13/cobra"

	"culvert.dev/identity/jwt"
	"culvert.dev/internal/gateway"
	"culvert.dev/registry"
	"culvert.dev/registry/file"
	"culvert.dev/tunnel"
)

func newPolicy() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "policy",
		Short: "Test policies, or try them on the requests of a log",
		Long: `Policy asks the policies of a configuration what they would decide: about the
requests of a file of expectations, or about those of an access log.`,
		Args: subcommand,
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	cmd.AddCommand(newPolicyTest(), newPolicyDryRun())
	return cmd
}

type policyOptions struct {
	sourceOptions
	output string
}

// addConfig adds the flags of what is asked.
func (o *policyOptions) addConfig(cmd *cobra.Command) {
	cmd.Flags().StringVar(&o.config, "config", "", "configuration `FILE`")
	_ = cmd.MarkFlagFilename("config", "yaml", "yml")
	addOutput(cmd, &o.output)
}

func newPolicyTest() *cobra.Command {
	var o policyOptions
	cmd := &cobra.Command{
		Use:   "test FILE",
		Short: "Compare what policies decide with what is expected",
		Long: `Test reads expectations and asks the policies of a configuration for each of them.
An expectation names the caller ("as" and "from"), the target ("to"), perhaps the
"listener" and "protocol", and what it expects: allow or deny, and perhaps "by"
which policy:

  tests:
    - {as: "spiffe://corp.example/ns/shop/sa/api", from: 10.1.2.3, to: "db.example.com:5432", expect: allow, by: db}
    - {as: alice, to: "db.example.com:5432", expect: deny}

Nothing is dialed and no name is looked up. The exit code is 0 if all are as
expected, 1 if one is not, and 2 if a file can't be read.`,
		Example: `  culvert policy test expectations.yaml --config culvert.yaml
  culvert policy test expectations.yaml --config culvert.yaml -o json`,
		Args: args(1, "one FILE"),
		RunE: func(cmd *cobra.Command, a []string) error {
			return runPolicyTest(cmd.Context(), cmd.OutOrStdout(), &o, a[0])
		},
	}
	o.addConfig(cmd)
	return cmd
}

// A testedExpectation is what "culvert policy test -o json" prints of an expectation.
type testedExpectation struct {
	File   string        `json:"file"`
	Line   int           `json:"line"`
	As     string        `json:"as,omitempty"`
	From   *netip.Addr   `json:"from,omitempty"`
	To     string        `json:"to"`
	Good   bool          `json:"good"`
	Expect string        `json:"expect"`
	By     string        `json:"by,omitempty"`
	Got    string        `json:"got"` // allow, deny, or why neither can be said
	GotBy  string        `json:"gotBy,omitempty"`
	Origin string        `json:"origin,omitempty"` // of the policy that decided
	Reason tunnel.Reason `json:"reason,omitempty"` // of a refusal
	Detail string        `json:"detail,omitempty"`
}

func runPolicyTest(ctx context.Context, w io.Writer, o *policyOptions, path string) error {
	tests, err := file.LoadExpectations(path)
	if err != nil {
		return usage(err)
	}
	r, err := newRehearsal(ctx, &o.sourceOptions)
	if err != nil {
		return err
	}
	r.lookUpNothing()
	all, failed := []testedExpectation{}, 0
	for _, e := range tests {
		t := r.expectation(ctx, path, &e)
		if !t.Good {
			failed++
		}
		all = append(all, t)
	}
	if o.output == "json" {
		err = writeJSON(w, all)
	} else {
		err = printTested(w, all, failed)
	}
	if err == nil && failed > 0 {
		err = errSilent
	}
	return err
}

// expectation asks for one expectation.
func (r *rehearsal) expectation(ctx context.Context, path string, e *file.Expectation) testedExpectation {
	t := testedExpectation{File: path, Line: e.Line, As: e.As, To: e.To, Expect: e.Expect, By: e.By}
	q := gateway.Query{Host: e.To, As: e.As, From: e.From, Listener: e.Listener, Proto: e.Protocol}
	if e.From.IsValid() {
		t.From = &e.From
	}
	if host, port, err := net.SplitHostPort(e.To); err == nil {
		n, err := strconv.ParseUint(port, 10, 16)
		if err != nil || n == 0 {
			t.Got = fmt.Sprintf("port %q is not a number from 1 to 65535", port)
			return t
		}
		q.Host, q.Port = host, uint16(n)
	}
	x, err := r.explain(ctx, q)
	if err != nil {
		t.Got = err.Error()
		return t
	}
	if x.Policy != nil {
		t.GotBy, t.Origin = x.Policy.Policy, x.Policy.Origin
	}
	switch t.Reason = x.Reason; x.Reason {
	case tunnel.Denied, tunnel.NotExposed, tunnel.NoAuth:
		t.Got, t.Detail = "deny", x.Detail
	case tunnel.NoRoute, tunnel.BadRequest, tunnel.BadPreamble, tunnel.BadHello, tunnel.NoSNI:
		t.Got, t.Detail = "no route", x.Detail
	default: // what comes after the policies
		t.Got = "allow"
	}
	t.Good = t.Got == e.Expect && (e.By == "" || e.By == t.GotBy)
	return t
}

func printTested(w io.Writer, all []testedExpectation, failed int) error {
	for _, t := range all {
		if t.Good {
			continue
		}
		who, by := t.As, ""
		if who == "" {
			who = "a caller without an identity"
		}
		if t.From != nil {
			who += " from " + t.From.String()
		}
		if t.By != "" {
			by = " by " + t.By
		}
		fmt.Fprintf(w, "%s:%d: %s to %s: want %s%s, got %s", t.File, t.Line, printable(who), printable(t.To), t.Expect, by, printable(t.Got))
		if t.GotBy != "" {
			fmt.Fprintf(w, " by %s of %s", printable(t.GotBy), printable(t.Origin))
		}
		if t.Detail != "" {
			fmt.Fprintf(w, "\n  %s: %s", t.Reason, printable(t.Detail))
		}
		fmt.Fprintln(w)
	}
	_, err := fmt.Fprintf(w, "%d of %d expectations are met\n", len(all)-failed, len(all))
	return err
}

// A rehearsal answers for the gateway that a configuration would start, without one.
type rehearsal struct {
	config   *file.Config
	gateway  gateway.Config
	registry *registry.Registry
	router   *tunnel.Router
	tokens   *jwt.Tokens // whose service accounts may be asked about
}

func newRehearsal(ctx context.Context, o *sourceOptions) (*rehearsal, error) {
	c, err := o.load()
	if err != nil {
		return nil, err
	}
	cfg, err := gatewayConfig(c)
	if err != nil {
		return nil, err
	}
	if cfg.Listeners, err = preparedListeners(&cfg); err != nil {
		return nil, err
	}
	guard, err := gateway.NewGuard(cfg)
	if err != nil {
		return nil, err
	}
	direct := &tunnel.NetDialer{Guard: guard}
	reg, err := runRegistry(ctx, c, direct)
	if err != nil {
		return nil, err
	}
	tokens, err := knownTokens(cfg.Issuers)
	if err != nil {
		return nil, err
	}
	return &rehearsal{config: c, gateway: cfg, registry: reg, router: &tunnel.Router{Resolver: reg, Dialer: direct}, tokens: tokens}, nil
}

// lookUpNothing has the names of endpoints stand for an address of documentation, so that
// answers do not depend on DNS.
func (r *rehearsal) lookUpNothing() {
	r.registry.Lookup = func(context.Context, string) ([]netip.Addr, error) {
		return []netip.Addr{netip.AddrFrom4([4]byte{192, 0, 2, 1})}, nil
	}
}

// explain says what q would meet.
func (r *rehearsal) explain(ctx context.Context, q gateway.Query) (x *gateway.Explanation, err error) {
	if q.Listener, err = pickListener(r.config, q.Listener); err != nil {
		return nil, err
	}
	q.Tokens = r.tokens
	return gateway.Explain(ctx, r.router, r.gateway.Listeners, q), nil
}
