package command

import (
	"fmt"
	"io"
	"net/url"
	"strings"

	"github.com/spf13/cobra"

	"culvert.dev/internal/gateway"
)

func newExposed() *cobra.Command {
	var o registryOptions
	cmd := &cobra.Command{
		Use:   "exposed [NAME]",
		Short: "Show which services can be reached, from which listeners, and by whom",
		Long: `Exposed lists the services that clients may reach at all, with the listeners that
lead there, the networks that they are exposed to, and the policies that select
them with the callers of each. Services that are private are left out.

With --admin it asks a running gateway, and with --config it reads the
configuration that a gateway would be started with. "culvert explain" says what
policies decide about one caller.`,
		Example: `  culvert exposed --config culvert.yaml
  culvert exposed db.example.com --admin unix:/run/culvert/admin.sock -o json`,
		Args: func(cmd *cobra.Command, a []string) error {
			if len(a) == 0 {
				return nil
			}
			return args(1, "at most one NAME")(cmd, a)
		},
		ValidArgsFunction: func(cmd *cobra.Command, a []string, _ string) ([]string, cobra.ShellCompDirective) {
			return completeNames(cmd.Context(), o.admin, o.config, a)
		},
		RunE: func(cmd *cobra.Command, a []string) error {
			q := url.Values{"policies": {"1"}}
			if len(a) > 0 {
				q.Set("name", a[0])
			}
			return o.run(cmd.Context(), cmd.OutOrStdout(), q, o.exposed)
		},
	}
	f := cmd.Flags()
	f.StringVar(&o.admin, "admin", "", "`ADDR` of a running gateway's admin port: HOST:PORT or unix:PATH")
	f.StringVar(&o.config, "config", "", "read the configuration `FILE` instead of asking a gateway")
	_ = cmd.MarkFlagFilename("config", "yaml", "yml")
	cmd.MarkFlagsMutuallyExclusive("admin", "config")
	addOutput(cmd, &o.output)
	return cmd
}

// exposed prints the services that are not private.
func (o *registryOptions) exposed(w io.Writer, events <-chan gateway.RegistryEvent) error {
	found := []*gateway.ListedService{}
	for e := range events {
		if e.Service != nil && e.Service.Exposed && len(e.Service.Listeners) > 0 {
			found = append(found, e.Service)
		}
	}
	if o.output == "json" {
		return writeJSON(w, found)
	}
	rows := [][]string{{"SERVICE", "PORTS", "LISTENERS", "EXPOSED TO", "POLICY", "CALLERS"}}
	for _, s := range found {
		columns := serviceRow(s)
		row := []string{s.Name, columns[1], strings.Join(s.Listeners, " "), columns[2], "-", "everybody"}
		if len(s.Policies) == 0 {
			rows = append(rows, row)
		}
		for _, p := range s.Policies {
			callers := "nobody"
			if len(p.Callers) > 0 {
				callers = strings.Join(p.Callers, "; ")
			}
			row[4], row[5] = fmt.Sprintf("%s %s %s", p.Tier, p.Action, printable(p.Name)), printable(callers)
			if p.DryRun {
				row[4] += ", dry run"
			}
			rows = append(rows, row)
			row = make([]string, len(row))
		}
	}
	return writeTable(w, rows)
}
