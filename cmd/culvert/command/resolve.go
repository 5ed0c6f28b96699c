package command

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strings"

	"github.com/spf13/cobra"

	"culvert.dev/internal/gateway"
	"culvert.dev/tunnel"
)

type resolveOptions struct {
	admin  string
	config string
	from   string
	output string
}

func newResolve() *cobra.Command {
	var o resolveOptions
	cmd := &cobra.Command{
		Use:   "resolve NAME",
		Short: "Show how a name resolves from each network, and why",
		Long: `Resolve shows what a name means to clients in each network: the endpoints, if
they are reached directly, or else the gateways that lead to them, and the
addresses that DNS answers. In networks of dns.vipNetworks these are the
service's virtual IPs.

With --admin it asks a running gateway, which also reports the health of
endpoints and gateways, as "culvert status" does; "-" means unknown. With
--config it reads the configuration that a gateway would be started with.

The exit code is 1 if the name means nothing in any of the networks.`,
		Example: `  culvert resolve db.example.com --config culvert.yaml
  culvert resolve db-0.db.west --from east --admin unix:/run/culvert/admin.sock
  culvert resolve db.example.com --from 192.0.2.7 --config culvert.yaml -o json`,
		Args: args(1, "one NAME"),
		ValidArgsFunction: func(cmd *cobra.Command, a []string, _ string) ([]string, cobra.ShellCompDirective) {
			return completeNames(cmd.Context(), o.admin, o.config, a)
		},
		RunE: func(cmd *cobra.Command, a []string) error {
			return runResolve(cmd.Context(), cmd.OutOrStdout(), &o, a[0])
		},
	}
	f := cmd.Flags()
	f.StringVar(&o.admin, "admin", "", "`ADDR` of a running gateway's admin port: HOST:PORT or unix:PATH")
	f.StringVar(&o.config, "config", "", "read the configuration `FILE` instead of asking a gateway")
	f.StringVar(&o.from, "from", "", "`NETWORK` of the client, an address in it, or none (default: all networks)")
	_ = cmd.MarkFlagFilename("config", "yaml", "yml")
	cmd.MarkFlagsMutuallyExclusive("admin", "config")
	addOutput(cmd, &o.output)
	return cmd
}

func runResolve(ctx context.Context, w io.Writer, o *resolveOptions, name string) error {
	var r *gateway.Resolution
	var err error
	if o.config == "" {
		r, err = resolveThere(ctx, o, name)
	} else {
		r, err = resolveHere(ctx, o, name)
	}
	if err != nil {
		return err
	}
	if o.output == "json" {
		err = writeJSON(w, r)
	} else {
		err = printResolution(w, r)
	}
	for _, v := range r.Views {
		if v.Reason == "" {
			return err
		}
	}
	if err == nil {
		err = errSilent
	}
	return err
}

// resolveThere asks a running gateway.
func resolveThere(ctx context.Context, o *resolveOptions, name string) (*gateway.Resolution, error) {
	c, err := askedGateway(o.admin)
	if err != nil {
		return nil, err
	}
	var r gateway.Resolution
	if err := c.ask(ctx, http.MethodGet, "/resolve", url.Values{"name": {name}, "from": {o.from}}, &r); err != nil {
		return nil, err
	}
	return &r, nil
}

// resolveHere answers from the configuration a gateway would be started with.
func resolveHere(ctx context.Context, o *resolveOptions, name string) (*gateway.Resolution, error) {
	c, err := (&sourceOptions{config: o.config}).load()
	if err != nil {
		return nil, err
	}
	reg, err := runRegistry(ctx, c, &tunnel.NetDialer{})
	if err != nil {
		return nil, err
	}
	r, err := gateway.ResolveFrom(namesSource(reg, c), name, o.from)
	if err != nil {
		return nil, usageError("", "%w", err)
	}
	return r, nil
}

func printResolution(w io.Writer, r *gateway.Resolution) error {
	health := func(state string) string {
		if state == "" { // nobody has looked
			return "-"
		}
		return paintedState(state)
	}
	for _, v := range r.Views {
		where := "from " + v.Network
		if v.Network == "" {
			where = "from no network"
		}
		if v.Here {
			where += ", where the gateway is"
		}
		fmt.Fprintf(w, "%s\n", where)
		if v.Reason != "" {
			fmt.Fprintf(w, "  nothing: %s (%s)\n", v.Reason, strings.TrimPrefix(v.Detail, "registry: "))
			continue
		}
		for _, s := range v.Services {
			fmt.Fprintf(w, "  service %s, by %s: %s\n", s.Service, s.Pattern, s.Why)
			var rows [][]string
			for _, ep := range s.Endpoints {
				rows = append(rows, []string{"    " + ep.Address, health(ep.State), ep.Name, printable(ep.Error)})
			}
			for _, g := range s.Gateways {
				rows = append(rows, []string{"    " + g.Address, health(g.State), fmt.Sprintf("network %s, weight %d, by %s", g.Network, g.Weight, strings.Join(g.Transports, ", ")), printable(g.Error)})
			}
			for _, a := range s.VIPs {
				rows = append(rows, []string{"    " + a.String(), "VIP"})
			}
			if err := writeTable(w, rows); err != nil {
				return err
			}
		}
		answer := strings.Join(v.DNS, " ")
		if answer == "" {
			answer = "no address"
		}
		if _, err := fmt.Fprintf(w, "  DNS: %s\n", answer); err != nil {
			return err
		}
	}
	return nil
}
