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
	"os"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"culvert.dev/nat"
	"culvert.dev/nat/upnp"
	"culvert.dev/registry/file"
)

// natSettings are what c says of the router; nil for nothing.
func natSettings(c *file.Config) *nat.Settings {
	if c.NAT == nil {
		return nil
	}
	s := &nat.Settings{Router: c.NAT.Router, Protocols: c.NAT.Protocols, Lifetime: c.NAT.Lifetime, STUN: c.NAT.STUNServers}
	for _, p := range c.NAT.Ports {
		s.Ports = append(s.Ports, natPort(p))
	}
	return s
}

// natPort is the port of a listener as package nat has it.
func natPort(p file.NATPort) nat.Port {
	out := nat.Port{Name: p.Listener, Network: "tcp", External: p.External}
	address, udp := strings.CutPrefix(p.Listener, "udp://")
	if udp {
		out.Network = "udp"
	}
	if at, err := net.ResolveTCPAddr("tcp", ":"+address[strings.LastIndexByte(address, ':')+1:]); err == nil {
		out.Internal = at.AddrPort().Port()
	}
	return out
}

// natSecret returns what is the same on this machine after a crash: systemd's id of the machine,
// which is hashed before it is used, as machine-id(5) has it. Without one it is empty.
func natSecret() []byte {
	b, err := os.ReadFile("/etc/machine-id")
	if err != nil {
		return nil
	}
	return []byte(strings.TrimSpace(string(b)))
}

type natOptions struct {
	admin  adminOptions
	watch  watchFlag
	output string
}

func newNAT() *cobra.Command {
	var o natOptions
	cmd := &cobra.Command{
		Use:   "nat",
		Short: "Show the ports that the router maps to a running gateway",
		Long: `Nat shows what is between a running gateway and the internet, and the ports that
the router maps to it, as "nat" in the configuration asks for.

STATE is pending while the router has not granted the mapping; mapped once it
has; verified once a gateway of another network has connected to the port and
reached this one; and direct where there is no NAT.

The exit code is 1 if a port is pending.`,
		Example: `  culvert nat --admin unix:/run/culvert/admin.sock
  culvert nat --config culvert.yaml --watch
  culvert nat --admin 127.0.0.1:9090 -o json | jq -r '.mappings[].external'
  culvert nat probe --stun stun.example.com:3478`,
		Args: args(0, "no arguments"),
		RunE: func(cmd *cobra.Command, _ []string) error {
			return o.watch.run(cmd.Context(), cmd.OutOrStdout(), o.output, func(ctx context.Context, w io.Writer) error {
				return runNAT(ctx, w, &o)
			})
		},
	}
	o.admin.add(cmd)
	o.watch.add(cmd)
	addOutput(cmd, &o.output)
	cmd.AddCommand(newNATProbe())
	return cmd
}

func runNAT(ctx context.Context, w io.Writer, o *natOptions) error {
	c, err := o.admin.client()
	if err != nil {
		return err
	}
	s, err := c.status(ctx)
	if err != nil {
		return err
	}
	if s.NAT == nil {
		return &cliError{err: errors.New("the gateway maps no ports"), hint: `add nat: {ports: [":443"]} to its configuration`, code: exitFailed}
	}
	if o.output == "json" {
		err = writeJSON(w, s.NAT)
	} else {
		err = printNAT(w, s.NAT)
	}
	for i := range s.NAT.Mappings {
		if err == nil && s.NAT.Mappings[i].State == nat.Pending {
			return errSilent
		}
	}
	return err
}

// printNAT prints s for people.
func printNAT(w io.Writer, s *nat.Status) error {
	var b strings.Builder
	line := func(what, format string, args ...any) {
		fmt.Fprintf(&b, "%-10s %s\n", what+":", printable(fmt.Sprintf(format, args...)))
	}
	line("nat", "%s: %s", s.Kind, s.Explanation)
	if r := s.Route; r != nil {
		line("router", "%s, from %s", r.Router, r.Local)
	}
	if len(s.Protocols) > 0 {
		line("protocols", "%s", strings.Join(s.Protocols, ", "))
	}
	if s.Outside.IsValid() {
		line("outside", "%s, as the router says", s.Outside)
	}
	if s.Seen.IsValid() {
		line("seen", "%s, as a STUN server says", s.Seen)
	}
	if s.Unseen != "" {
		line("stun", "%s", s.Unseen)
	}
	if s.Problem != "" {
		line("problem", "%s", s.Problem)
	}
	if len(s.Mappings) > 0 {
		b.WriteByte('\n')
		t := tabwriter.NewWriter(&b, 0, 0, 2, ' ', 0)
		fmt.Fprintln(t, "LISTENER\tSTATE\tEXTERNAL\tBY\tEXPIRES\tERROR")
		for i := range s.Mappings {
			p := &s.Mappings[i]
			external, expires := "-", "-"
			if p.External.IsValid() {
				external = p.External.String()
			}
			if !p.Expires.IsZero() {
				expires = "in " + humanSeconds(max(time.Until(p.Expires), 0).Seconds())
			}
			fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%s\t%s\n", printable(p.Listener), p.State, external, cmp.Or(p.Protocol, "-"), expires, cmp.Or(printable(strings.ReplaceAll(p.Error, "\n", "; ")), "-"))
		}
		if err := t.Flush(); err != nil {
			return err
		}
	}
	_, err := io.WriteString(w, b.String())
	return err
}

type natProbeOptions struct {
	router  string
	stun    []string
	timeout time.Duration
	output  string
}

func newNATProbe() *cobra.Command {
	var o natProbeOptions
	cmd := &cobra.Command{
		Use:   "probe",
		Short: "Find out what is between this machine and the internet",
		Long: `Probe asks the router and STUN servers, once, for the outside address of this
machine, and says what kind of NAT there is and by which protocols the router
maps ports. It maps none, and needs no gateway.

The exit code is 1 if no port can be mapped: the router speaks none of PCP,
NAT-PMP and UPnP, or there is another NAT in front of it.`,
		Example: `  culvert nat probe
  culvert nat probe --stun stun.example.com:3478
  culvert nat probe --router 192.168.1.1 -o json`,
		Args: args(0, "no arguments"),
		RunE: func(cmd *cobra.Command, _ []string) error {
			return runNATProbe(cmd.Context(), cmd.OutOrStdout(), &o)
		},
	}
	f := cmd.Flags()
	f.StringVar(&o.router, "router", "", "address of the router (default: that of the default route, on Linux)")
	f.StringArrayVar(&o.stun, "stun", nil, "host:port of a STUN server; may be repeated")
	f.DurationVar(&o.timeout, "timeout", 5*time.Second, "limit for all answers together")
	addOutput(cmd, &o.output)
	return cmd
}

func runNATProbe(ctx context.Context, w io.Writer, o *natProbeOptions) error {
	s := nat.Settings{STUN: o.stun}
	if o.router != "" {
		var err error
		if s.Router, err = netip.ParseAddr(o.router); err != nil || !s.Router.Is4() {
			return usageError("write an IPv4 address, such as 192.168.1.1", "--router %q", o.router)
		}
	}
	if o.timeout <= 0 {
		return usageError("give it some seconds", "--timeout %v", o.timeout)
	}
	for _, server := range o.stun {
		if _, _, err := net.SplitHostPort(server); err != nil {
			return usageError("write host:port", "--stun %q", server)
		}
	}
	ctx, cancel := context.WithTimeoutCause(ctx, o.timeout, errors.New("no answer in time"))
	defer cancel()
	m := &nat.Manager{FindUPnP: new(upnp.Finder).Find, Log: slog.New(slog.DiscardHandler)}
	status, err := m.Probe(ctx, s)
	switch {
	case err != nil && o.router == "":
		return &cliError{err: err, hint: "give the address of the router: --router 192.168.1.1", code: exitFailed}
	case err != nil:
		return err
	}
	if o.output == "json" {
		err = writeJSON(w, status)
	} else {
		err = printNAT(w, status)
	}
	if err == nil && status.Kind != nat.NoNAT && (len(status.Protocols) == 0 || status.Kind != nat.SingleNAT) {
		return errSilent
	}
	return err
}
