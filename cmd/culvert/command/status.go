package command

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"maps"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"culvert.dev/identity/jwt"
	"culvert.dev/internal/gateway"
	"culvert.dev/nat"
	"culvert.dev/registry"
	"culvert.dev/registry/peer"
)

type statusOptions struct {
	admin  adminOptions
	down   bool
	kube   bool
	watch  watchFlag
	output string
}

func newStatus() *cobra.Command {
	var o statusOptions
	cmd := &cobra.Command{
		Use:   "status",
		Short: "Show the state of a running gateway",
		Long: `Status shows whether a running gateway is ready, its listeners, the age of its
table, and the health of endpoints and gateways that are checked or could not be
dialed, worst first.

STATE is down if a check failed; open if connections fail again and again, so that
requests are refused at once and one each second is a trial; failing if a dial failed and the address is
tried last for a while, or ejected if that is by outlierEjection; suspect if that
time is over and nothing has reached the address since; and up if a check passed.
BY is the kind of the check, dial, or tunnels for an ejection.

With --kube it shows the state of Kubernetes instead: clusters, which replica
writes status, Gateways with their listeners, and refused objects.

The exit code is 1 if the gateway is not ready.`,
		Example: `  culvert status --admin unix:/run/culvert/admin.sock
  culvert status --config culvert.yaml --down
  culvert status --watch
  culvert status --admin unix:/run/culvert/admin.sock --kube
  culvert status --admin 127.0.0.1:9090 -o json | jq -r '.health[] | select(.state == "down").address'`,
		Args: args(0, "no arguments"),
		RunE: func(cmd *cobra.Command, _ []string) error {
			return o.watch.run(cmd.Context(), cmd.OutOrStdout(), o.output, func(ctx context.Context, w io.Writer) error {
				return runStatus(ctx, w, &o)
			})
		},
	}
	o.admin.add(cmd)
	cmd.Flags().BoolVar(&o.down, "down", false, "show only addresses that are not up")
	cmd.Flags().BoolVar(&o.kube, "kube", false, "show the state of Kubernetes: clusters, Gateways, refused objects")
	cmd.MarkFlagsMutuallyExclusive("down", "kube")
	o.watch.add(cmd)
	addOutput(cmd, &o.output)
	return cmd
}

func runStatus(ctx context.Context, w io.Writer, o *statusOptions) error {
	c, err := o.admin.client()
	if err != nil {
		return err
	}
	s, err := c.status(ctx)
	if err != nil {
		return err
	}
	if o.kube {
		return kubeStatus(w, s, o.output == "json")
	}
	all := s.Health
	if o.down {
		s.Health = nil
		for _, h := range all {
			if h.State != registry.StateUp {
				s.Health = append(s.Health, h)
			}
		}
	}
	if o.output == "json" {
		err = writeJSON(w, s)
	} else {
		err = printStatus(w, s, all)
	}
	if err == nil && !s.Ready {
		return errSilent
	}
	return err
}

// A runningStatus is what a running gateway says of itself, with the parts that
// package gateway does not know taken apart.
type runningStatus struct {
	gateway.Status
	Kubernetes *kubeReport         `json:"kubernetes,omitempty"`
	Identity   *identityStatus     `json:"identity,omitempty"`
	Capture    *agentCaptureStatus `json:"capture,omitempty"`
}

// status asks a running gateway how it is.
func (c *adminClient) status(ctx context.Context) (*runningStatus, error) {
	var s runningStatus
	if err := c.ask(ctx, http.MethodGet, "/status", nil, &s); err != nil {
		return nil, err
	}
	return &s, nil
}

// printStatus prints s. all has the health of all addresses, of which s may have a part.
func printStatus(w io.Writer, s *runningStatus, all []gateway.StatusHealth) error {
	var b strings.Builder
	line := func(what, format string, args ...any) {
		fmt.Fprintf(&b, "%-10s %s\n", what+":", printable(fmt.Sprintf(format, args...)))
	}
	ready := good("yes")
	if !s.Ready {
		ready = bad("no")
	}
	if s.Why != "" {
		ready += map[bool]string{true: ", but ", false: ": "}[s.Ready] + printable(s.Why)
	}
	if s.Version != "" {
		line("version", "%s", s.Version)
	}
	fmt.Fprintf(&b, "%-10s %s\n", "ready:", ready)
	line("up", "%s, since %s", humanSeconds(time.Since(s.Started).Seconds()), s.Started.UTC().Format(time.RFC3339))
	table := "in touch with every source"
	switch {
	case s.Stale != nil && s.Stale.Mistaken:
		table = fmt.Sprintf("as it was %s ago: %s has mistakes", humanSeconds(time.Since(s.Stale.Since).Seconds()), s.Stale.Source)
	case s.Stale != nil:
		table = fmt.Sprintf("%s old: source %s is lost", humanSeconds(time.Since(s.Stale.Since).Seconds()), s.Stale.Source)
	}
	line("table", "generation %d, %s, %s", s.Generation, plural(s.Services, "service"), table)
	for _, w := range s.Restart {
		line("restart", "needed for %s: %s is in force, and the file has %s", w.Key, cmp.Or(w.InForce, "nothing"), cmp.Or(w.Configured, "nothing"))
	}
	line("tunnels", "%d open", s.Tunnels)
	printReverse(line, s.Reverse)
	printInsecure(line, s)
	printLimits(line, s)
	printListeners(line, s)
	if s.DNS != nil {
		printDNSStatus(line, s.DNS)
	}
	if s.Capture != nil {
		line("capture", "%s", s.Capture)
	}
	for _, a := range s.Admin {
		if a.Problem != "" {
			line("admin", "%s: %s", cmp.Or(a.Address, a.Configured), a.Problem)
		}
	}
	if s.SiteProblem != "" {
		line("site", "%s", describeSiteProblem(s.SiteProblem))
	}
	for i := range s.Peers {
		if p := &s.Peers[i]; p.Bundle != "" {
			line("peer", "%s: %s", p.Name, p.Bundle)
		}
	}
	if s.NAT != nil {
		printNATProblems(line, s.NAT)
	}
	if s.Catalog != nil {
		line("catalog", "%s", describeCatalog(s.Catalog))
	}
	for _, t := range s.Transports {
		if !t.Up {
			line("transport", "%s to gateway %s is down since %s: %s", t.Carrier, t.Gateway, t.Since.UTC().Format(time.RFC3339), t.Error)
		}
	}
	printIdentity(line, s.Identity)
	for i := range s.Issuers {
		line("issuer", "%s", describeIssuer(&s.Issuers[i], time.Now()))
	}
	printExpiry(line, s)
	up := 0
	for _, h := range all {
		if h.State == registry.StateUp {
			up++
		}
	}
	if len(all) > 0 {
		line("health", "%d of %s up", up, plural(len(all), "address"))
	} else {
		line("health", "no address is checked, and none has failed")
	}
	if _, err := io.WriteString(w, b.String()); err != nil || len(s.Health) == 0 {
		return err
	}
	if _, err := fmt.Fprintln(w); err != nil {
		return err
	}
	return writeTable(w, healthRows(s.Health), 0)
}

// printInsecure prints what may go without TLS.
func printInsecure(line func(what, format string, args ...any), s *runningStatus) {
	if s.Insecure != nil {
		for _, name := range s.Insecure.Networks {
			line("insecure", "plaintext may go to network %s without mutual TLS", name)
		}
		if n := s.Insecure.Count; n > 0 {
			line("insecure", "plaintext may go without mutual TLS to %s: %s", plural(n, "service"), strings.Join(s.Insecure.Services, ", "))
		}
	}
}

// printLimits prints which limits are reached.
func printLimits(line func(what, format string, args ...any), s *runningStatus) {
	for i := range s.Limits {
		if l := &s.Limits[i]; l.Full() {
			line("limit", "service %s has %s", l.Service, describeLimits(l))
		}
	}
	for i := range s.Clients {
		if c := &s.Clients[i]; c.Full() {
			line("limit", "%s", describeClient(c))
		}
	}
}

// printListeners prints the listeners of the file, and those of other sources.
func printListeners(line func(what, format string, args ...any), s *runningStatus) {
	for _, l := range s.Listeners {
		problem := ""
		if l.Problem != "" {
			problem = ": " + l.Problem
		}
		line("listener", "%s (%s)%s", cmp.Or(l.Address, l.Configured), strings.Join(l.Protocols, ", "), problem)
		for _, t := range l.TLS {
			names := strings.Join(t.Names, ", ")
			if t.Any {
				names = "any name"
			}
			line("tls", "ends at %s for %s (%s), client certificates %s", l.Configured, names, strings.Join(t.Protocols, ", "), t.ClientCertificates)
		}
	}
	for _, l := range s.SourceListeners {
		problem := ""
		if l.Problem != "" {
			problem = ": " + l.Problem
		}
		line("listener", "%s (%s) of %s, %s%s", l.Address, l.Protocol, l.Name, l.State, problem)
	}
}

// printExpiry prints when the certificates of files expire.
func printExpiry(line func(what, format string, args ...any), s *runningStatus) {
	for _, c := range s.Certificates {
		left := time.Until(c.NotAfter)
		when := "expires in " + humanSeconds(left.Seconds())
		if left < 0 {
			when = "expired " + humanSeconds(-left.Seconds()) + " ago"
		}
		line("expiry", "%s of %s %s, at %s", c.File, c.UsedBy, when, c.NotAfter.UTC().Format(time.RFC3339))
	}
}

// healthRows returns a table of the health of addresses.
func healthRows(all []gateway.StatusHealth) [][]string {
	rows := [][]string{{"FOR", "STATE", "ADDRESS", "BY", "OF", "ERROR"}}
	for _, h := range all {
		address := h.Address
		if h.Host != "" {
			address = h.Host + " " + h.Address
		}
		if h.Via != "" {
			address = h.Address + " via " + h.Via
		}
		rows = append(rows, []string{
			humanSeconds(time.Since(h.Since).Seconds()), paintedState(h.State), printable(address),
			h.By, printable(ofWhat(&h)), printable(h.Error),
		})
	}
	return rows
}

// describeSiteProblem says what it means that the state of joined sites can't be used.
func describeSiteProblem(problem string) string {
	return "no site can join, and those that have joined are not used: " + problem
}

// printNATProblems prints which ports are not mapped, and why.
func printNATProblems(line func(what, format string, args ...any), s *nat.Status) {
	for i := range s.Mappings {
		if p := &s.Mappings[i]; p.State == nat.Pending {
			line("nat", "the router does not map %s: %s", p.Listener, cmp.Or(p.Error, s.Problem, "it has not answered yet"))
		}
	}
}

// describeCatalog says what an agent has of the catalog of its gateways.
func describeCatalog(c *peer.Status) string {
	text := plural(c.Services, "service")
	if c.Connected {
		text += ", by " + c.Gateway
	} else {
		text += fmt.Sprintf(", not connected for %s: %s", humanSeconds(time.Since(c.Since).Seconds()), c.Problem)
	}
	if n := len(c.LeftOut) + c.MoreLeft; n > 0 {
		text += fmt.Sprintf("; left out: %d, such as %s", n, c.LeftOut[0])
	}
	return text
}

// describeIssuer says how the keys of an issuer of tokens are.
func describeIssuer(i *jwt.Status, now time.Time) string {
	text := fmt.Sprintf("%s: %s", i.Issuer, plural(i.Keys, "key"))
	if i.Fetched != nil {
		text += ", fetched " + humanSeconds(now.Sub(*i.Fetched).Seconds()) + " ago"
	}
	if i.Next != nil {
		text += ", next in " + humanSeconds(max(i.Next.Sub(now), 0).Seconds())
	}
	if i.Error != "" {
		text += ": " + i.Error
	}
	return text
}

// printDNSStatus prints where DNS is answered, and whether those answer who are
// asked for the rest.
func printDNSStatus(line func(what, format string, args ...any), s *gateway.StatusDNS) {
	for _, l := range s.Listeners {
		view := ""
		if l.View != "" {
			view = " for network " + l.View
		}
		problem := ""
		if l.Problem != "" {
			problem = ": " + l.Problem
		}
		line("dns", "%s%s%s", cmp.Or(l.Address, l.Configured), view, problem)
	}
	for _, upstream := range slices.Sorted(maps.Keys(s.Upstreams)) {
		line("upstream", "%s %s", upstream, map[bool]string{true: "answers", false: "does not answer"}[s.Upstreams[upstream]])
	}
}

// paintedState is the state of an address in its color.
func paintedState(state string) string {
	switch state {
	case registry.StateUp:
		return good(state)
	case registry.StateDown, registry.StateOpen:
		return bad(state)
	}
	return doubtful(printable(state))
}

// ofWhat says what has an address.
func ofWhat(h *gateway.StatusHealth) string {
	const most = 2
	var of []string
	if h.Gateway != "" {
		of = append(of, "gateway of "+h.Gateway)
	}
	more := h.More
	for i, s := range h.Services {
		if i < most {
			of = append(of, s)
		} else {
			more++
		}
	}
	if more > 0 {
		of = append(of, fmt.Sprintf("%d more", more))
	}
	return strings.Join(of, ", ")
}

func plural(n int, what string) string {
	switch {
	case n == 1:
		return "1 " + what
	case strings.HasSuffix(what, "s"):
		what += "e"
	}
	return fmt.Sprintf("%d %ss", n, what)
}

// describeClient says what a client that is near a limit holds.
func describeClient(c *gateway.StatusClient) string {
	who := "client " + c.Client
	if c.Principal {
		who = "principal " + c.Client
	}
	var parts []string
	if c.MaxTunnels > 0 {
		parts = append(parts, fmt.Sprintf("%d of %d tunnels", c.Tunnels, c.MaxTunnels))
	}
	if c.MaxConnections > 0 {
		parts = append(parts, fmt.Sprintf("%d of %d connections", c.Connections, c.MaxConnections))
	}
	return who + " has " + strings.Join(parts, ", ")
}

// printReverse prints the reverse sessions to and from a gateway.
func printReverse(line func(what, format string, args ...any), s *gateway.ReverseStatus) {
	if s == nil {
		return
	}
	if s.Sessions+s.Names > 0 {
		line("reverse", "%s of connectors, %s", plural(s.Sessions, "session"), plural(s.Names, "name"))
	}
	for i := range s.Replicas {
		switch r := &s.Replicas[i]; {
		case r.Self:
		case !r.Connected:
			line("replica", "no stream to %s for %s: %s", printable(r.Address), humanSeconds(time.Since(r.Since).Seconds()), cmp.Or(printable(r.Error), "connecting"))
		default:
			line("replica", "%s at %s for %s, %s of connectors", printable(r.Replica), printable(r.Address), humanSeconds(time.Since(r.Since).Seconds()), plural(r.Names, "name"))
		}
	}
	for i := range s.To {
		switch x := &s.To[i]; {
		case !x.Connected:
			line("reverse", "no session to %s for %s: %s", x.Gateway, humanSeconds(time.Since(x.Since).Seconds()), cmp.Or(x.Error, "connecting"))
		default:
			line("reverse", "session to %s for %s, %s", x.Gateway, humanSeconds(time.Since(x.Since).Seconds()), plural(x.Streams, "stream"))
			for _, n := range x.Names {
				if n.Reason != "" {
					line("reverse", "%s refuses %s with %s: %s", x.Gateway, n.Name, n.Reason, n.Error)
				}
			}
		}
	}
}
