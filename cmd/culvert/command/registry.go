package command

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/url"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"culvert.dev/internal/gateway"
	"culvert.dev/tunnel"
)

type registryOptions struct {
	admin    string
	config   string
	networks bool
	output   string
}

func newRegistry() *cobra.Command {
	var o registryOptions
	cmd := &cobra.Command{
		Use:   "registry",
		Short: "Show the services and networks of a gateway",
		Long: `Registry shows the table of a running gateway, or the one that it would be
started with: its names, where they lead, and what changes.`,
		Args: subcommand,
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	f := cmd.PersistentFlags()
	f.StringVar(&o.admin, "admin", "", "`ADDR` of a running gateway's admin port: HOST:PORT or unix:PATH")
	f.StringVar(&o.config, "config", "", "read the configuration `FILE` instead of asking a gateway")
	_ = cmd.MarkPersistentFlagFilename("config", "yaml", "yml")
	cmd.MarkFlagsMutuallyExclusive("admin", "config")

	ls := &cobra.Command{
		Use:   "ls",
		Short: "List the services, or the networks",
		Example: `  culvert registry ls --admin 127.0.0.1:9090
  culvert registry ls --networks --config culvert.yaml`,
		Args: args(0, "no argument"),
		RunE: func(cmd *cobra.Command, _ []string) error {
			q := url.Values{}
			if o.networks {
				q.Set("networks", "1")
			}
			return o.run(cmd.Context(), cmd.OutOrStdout(), q, o.list)
		},
	}
	ls.Flags().BoolVar(&o.networks, "networks", false, "list the networks and their gateways")
	get := &cobra.Command{
		Use:     "get NAME",
		Short:   "Show a service, by one of its names",
		Example: `  culvert registry get db.example.com --admin unix:/run/culvert/admin.sock`,
		Args:    args(1, "one NAME"),
		ValidArgsFunction: func(cmd *cobra.Command, a []string, _ string) ([]string, cobra.ShellCompDirective) {
			return completeNames(cmd.Context(), o.admin, o.config, a)
		},
		RunE: func(cmd *cobra.Command, a []string) error {
			return o.run(cmd.Context(), cmd.OutOrStdout(), url.Values{"name": {a[0]}}, func(w io.Writer, events <-chan gateway.RegistryEvent) error {
				return o.get(w, events, a[0])
			})
		},
	}
	watch := &cobra.Command{
		Use:   "watch [NAME]",
		Short: "Show the services, and then changes as they happen",
		Example: `  culvert registry watch --admin unix:/run/culvert/admin.sock
  culvert registry watch db.example.com --admin 127.0.0.1:9090 -o json`,
		Args: func(cmd *cobra.Command, a []string) error {
			if len(a) == 0 {
				return nil
			}
			return args(1, "at most one NAME")(cmd, a)
		},
		RunE: func(cmd *cobra.Command, a []string) error {
			if o.config != "" {
				return usageError("give --admin ADDR", "only a running gateway's table changes")
			}
			q := url.Values{"watch": {"1"}}
			if len(a) > 0 {
				q.Set("name", a[0])
			}
			return o.run(cmd.Context(), cmd.OutOrStdout(), q, o.watch)
		},
	}
	for _, c := range []*cobra.Command{ls, get, watch} {
		addOutput(c, &o.output)
	}
	cmd.AddCommand(ls, get, watch)
	return cmd
}

// run asks for the events of q and has show print them.
func (o *registryOptions) run(ctx context.Context, w io.Writer, q url.Values, show func(io.Writer, <-chan gateway.RegistryEvent) error) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	events, failed := make(chan gateway.RegistryEvent), make(chan error, 1)
	ask, err := o.source(ctx, q)
	if err != nil {
		return err
	}
	go func() {
		defer close(events)
		failed <- ask(func(e gateway.RegistryEvent) bool {
			select {
			case events <- e:
				return true
			case <-ctx.Done():
				return false
			}
		})
	}()
	err = show(w, events)
	cancel()
	for range events {
	}
	if asked := <-failed; err == nil && !errors.Is(asked, context.Canceled) {
		err = asked
	}
	return err
}

// source returns what calls each with every event until that is false.
func (o *registryOptions) source(ctx context.Context, q url.Values) (func(each func(gateway.RegistryEvent) bool) error, error) {
	if o.config == "" {
		c, err := askedGateway(o.admin)
		if err != nil {
			return nil, err
		}
		body, err := c.do(ctx, "GET", "/registry", q)
		if err != nil {
			return nil, err
		}
		return func(each func(gateway.RegistryEvent) bool) error {
			defer body.Close()
			dec := json.NewDecoder(body)
			for {
				var e gateway.RegistryEvent
				switch err := dec.Decode(&e); {
				case errors.Is(err, io.EOF) && q.Get("watch") == "":
					return nil
				case err != nil && ctx.Err() != nil:
					return ctx.Err()
				case err != nil:
					return fmt.Errorf("lost the connection to the gateway: %w", err)
				}
				if !each(e) {
					return nil
				}
			}
		}, nil
	}
	c, err := (&sourceOptions{config: o.config}).load()
	if err != nil {
		return nil, err
	}
	reg, err := runRegistry(ctx, c, &tunnel.NetDialer{})
	if err != nil {
		return nil, err
	}
	return func(each func(gateway.RegistryEvent) bool) error {
		for v := range gateway.ListRegistry(ctx, reg, q) {
			if e, ok := v.(gateway.RegistryEvent); ok && !each(e) {
				return nil
			}
		}
		return nil
	}, nil
}

func (o *registryOptions) list(w io.Writer, events <-chan gateway.RegistryEvent) error {
	if o.output == "json" {
		return lines(w, events)
	}
	rows := [][]string{{"SERVICE", "PORTS", "EXPOSED TO", "ENDPOINTS", "NAMES"}}
	if o.networks {
		rows[0] = []string{"NETWORK", "RANGES", "GATEWAYS", "NEAR"}
	}
	for e := range events {
		if n := e.Network; n != nil {
			var ranges, gateways []string
			for _, c := range n.CIDRs {
				ranges = append(ranges, c.String())
			}
			for _, g := range n.Gateways {
				s := g.Address
				if g.Public != "" {
					s += " (" + g.Public + " outside)"
				}
				gateways = append(gateways, s)
			}
			rows = append(rows, []string{n.Name, orDash(ranges), orDash(gateways), orDash(n.Near)})
			continue
		}
		rows = append(rows, serviceRow(e.Service))
	}
	return writeTable(w, rows)
}

// serviceRow is a service as a row of a table.
func serviceRow(s *gateway.ListedService) []string {
	ports, exposed := "any", "everyone"
	if len(s.Ports) > 0 {
		ports = strings.Trim(strings.ReplaceAll(fmt.Sprint(s.Ports), " ", ","), "[]")
	}
	switch {
	case !s.Exposed:
		exposed = "nobody"
	case len(s.ExposedTo) > 0:
		exposed = strings.Join(s.ExposedTo, ",")
	}
	return []string{s.Name, ports, exposed, strconv.Itoa(len(s.Endpoints)), orDash(s.Names)}
}

func orDash(list []string) string {
	if len(list) == 0 {
		return "-"
	}
	return strings.Join(list, " ")
}

func lines(w io.Writer, events <-chan gateway.RegistryEvent) error {
	for e := range events {
		line, err := json.Marshal(e)
		if err != nil {
			return err
		}
		if _, err := w.Write(append(escapeJSON(line), '\n')); err != nil {
			return err
		}
	}
	return nil
}

func (o *registryOptions) get(w io.Writer, events <-chan gateway.RegistryEvent, name string) error {
	found := []*gateway.ListedService{}
	for e := range events {
		found = append(found, e.Service)
	}
	if len(found) == 0 {
		return &cliError{err: fmt.Errorf("there is no service %q", name), hint: "\"culvert registry ls\" lists the services", code: exitFailed}
	}
	if o.output == "json" {
		return writeJSON(w, found)
	}
	for _, s := range found {
		var rows [][]string
		row := func(key, value string) {
			if value != "" {
				rows = append(rows, []string{key, value})
			}
		}
		columns := serviceRow(s)
		row("service", s.Name)
		row("names", strings.Join(s.Names, " "))
		row("cluster", s.Cluster)
		row("namespace", s.Namespace)
		row("ports", columns[1])
		row("exposed to", columns[2])
		row("headless", yes(s.Headless))
		row("exported", yes(s.Exported))
		row("addresses", strings.Trim(fmt.Sprint(s.Addresses), "[]"))
		row("via", strings.Join(s.Via, "; "))
		row("from", s.Origin)
		for _, ep := range s.Endpoints {
			line := ep.Address
			if ep.Name != "" {
				line += ", called " + ep.Name
			}
			if ep.Network != "" {
				line += ", in network " + ep.Network
			}
			if len(ep.Via) > 0 {
				line += ", via " + strings.Join(ep.Via, "; ")
			}
			row("endpoint", line)
		}
		if err := writeTable(w, rows); err != nil {
			return err
		}
	}
	return nil
}

func yes(b bool) string {
	if b {
		return "yes"
	}
	return ""
}

func (o *registryOptions) watch(w io.Writer, events <-chan gateway.RegistryEvent) error {
	if o.output == "json" {
		return lines(w, events)
	}
	for e := range events {
		if e.Service == nil {
			continue
		}
		if _, err := fmt.Fprintf(w, "%-8s %6d  %s\n", e.Event, e.Generation, strings.Join(serviceRow(e.Service), "  ")); err != nil {
			return err
		}
	}
	return nil
}
