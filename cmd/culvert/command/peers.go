package command

import (
	"context"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"culvert.dev/registry"
	"culvert.dev/registry/file"
	"culvert.dev/registry/peer"
	"culvert.dev/registry/peer/join"
)

// peersOf are the peers of c.
func peersOf(c *file.Config) ([]peer.Config, error) {
	var all []peer.Config
	for i := range c.Peers {
		p := &c.Peers[i]
		one := peer.Config{Name: p.Name, Gateways: p.Gateways, IDs: p.IDs, Zones: p.Zones, ExposedTo: p.ExposedTo, State: p.State, Check: registry.Check{Kind: "tcp"}}
		for _, g := range p.Gateways {
			if at := slices.IndexFunc(g.Transports, func(h registry.Hop) bool { return h.KeyName != "" }); at >= 0 && one.Access.KeyName == "" {
				h := &g.Transports[at]
				one.Access = registry.Hop{KeyName: h.KeyName, TrustNames: h.TrustNames, Peers: h.Peers}
			}
		}
		all = append(all, one)
	}
	if c.Agent != nil && c.Agent.Catalog.Enabled {
		all = append(all, agentCatalog(c))
	}
	if err := peer.Check(all); err != nil {
		return nil, usageError("see peers in the configuration reference", "%w", err)
	}
	return all, nil
}

// agentCatalog is the catalog of the gateways of c's agent.
func agentCatalog(c *file.Config) peer.Config {
	one := peer.Config{Name: file.AgentNetwork, Network: file.AgentNetwork, Zones: c.Agent.Catalog.AcceptedZones(), State: c.Agent.Catalog.State}
	if at := slices.IndexFunc(c.Networks, func(n registry.Network) bool { return n.Name == file.AgentNetwork }); at >= 0 {
		one.Gateways = c.Networks[at].Gateways
	}
	return one
}

// siteOf is what c says of this site; nil for nothing.
func siteOf(c *file.Config) *join.Settings {
	if c.Site == nil {
		return nil
	}
	s := &join.Settings{Name: c.Cluster, Key: c.Site.Key, Trust: c.Site.Trust, State: c.Site.State}
	for _, g := range c.Site.Gateways {
		one := peer.Gateway{Address: g.Address, Transports: g.Transports}
		if len(one.Transports) == 0 {
			one.Transports = []string{"connect-h2"}
		}
		s.Gateways = append(s.Gateways, one)
	}
	return s
}

type peersOptions struct {
	admin  adminOptions
	watch  watchFlag
	output string
}

func newPeers() *cobra.Command {
	var o peersOptions
	cmd := &cobra.Command{
		Use:   "peers",
		Short: "Show the sites with which a running gateway exchanges catalogs",
		Long: `Peers lists the sites with which a running gateway exchanges its catalog of
services: whether what a peer offers is up to date, how many services are taken
and how many are offered to it, when something has come from it last, and what
of it is left out.

STATE is connected, or lost with the time since then. The last catalog of a peer
that is lost stays in force. GENERATION is that of the peer's catalog.`,
		Example: `  culvert peers --admin unix:/run/culvert/admin.sock
  culvert peers --config culvert.yaml --watch
  culvert peers --admin 127.0.0.1:9090 -o json | jq -r '.[] | select(.connected | not).name'`,
		Args: args(0, "no arguments"),
		RunE: func(cmd *cobra.Command, _ []string) error {
			return o.watch.run(cmd.Context(), cmd.OutOrStdout(), o.output, func(ctx context.Context, w io.Writer) error {
				return runPeers(ctx, w, &o)
			})
		},
	}
	o.admin.add(cmd)
	o.watch.add(cmd)
	addOutput(cmd, &o.output)
	cmd.AddCommand(newPeersRemove(&o.admin))
	return cmd
}

func runPeers(ctx context.Context, w io.Writer, o *peersOptions) error {
	c, err := o.admin.client()
	if err != nil {
		return err
	}
	s, err := c.status(ctx)
	if err != nil {
		return err
	}
	if o.output == "json" {
		return writeJSON(w, append([]peer.Status{}, s.Peers...))
	}
	return printPeers(w, s)
}

// printPeers prints the peers in s for people.
func printPeers(w io.Writer, s *runningStatus) error {
	all := s.Peers
	var notes []string
	if s.SiteProblem != "" {
		notes = append(notes, describeSiteProblem(s.SiteProblem))
	}
	if len(all) == 0 {
		notes = append([]string{"there are no peers"}, notes...)
		_, err := fmt.Fprintln(w, printable(strings.Join(notes, ": ")))
		return err
	}
	rows := [][]string{{"PEER", "STATE", "GENERATION", "TAKEN", "OFFERED", "CONTACT", "GATEWAY"}}
	for i := range all {
		p := &all[i]
		state, contact, gateway := good("connected"), "-", "-"
		if !p.Connected {
			state = bad("lost") + " " + humanSeconds(time.Since(p.Since).Seconds())
			notes = append(notes, fmt.Sprintf("%s: %s", p.Name, p.Problem))
		}
		if p.Bundle != "" {
			notes = append(notes, fmt.Sprintf("%s: %s", p.Name, p.Bundle))
		}
		if !p.Contact.IsZero() {
			contact = humanSeconds(time.Since(p.Contact).Seconds()) + " ago"
		}
		if p.Gateway != "" {
			gateway = map[bool]string{true: "to ", false: "from "}[p.Dialed] + p.Gateway
		}
		rows = append(rows, []string{p.Name, state, fmt.Sprint(p.Generation), fmt.Sprint(p.Services), fmt.Sprint(p.Offered), contact, printable(gateway)})
		for _, why := range p.LeftOut {
			notes = append(notes, fmt.Sprintf("%s: left out: %s", p.Name, why))
		}
		if p.MoreLeft > 0 {
			notes = append(notes, fmt.Sprintf("%s: left out: %d more", p.Name, p.MoreLeft))
		}
	}
	if err := writeTable(w, rows, 2, 3, 4); err != nil || len(notes) == 0 {
		return err
	}
	for i := range notes {
		notes[i] = printable(notes[i])
	}
	_, err := fmt.Fprintf(w, "\n%s\n", strings.Join(notes, "\n"))
	return err
}
