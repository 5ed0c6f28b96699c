package command

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"time"

	"github.com/spf13/cobra"

	"culvert.dev/internal/admin"
)

type refusalsOptions struct {
	admin  adminOptions
	watch  watchFlag
	output string
}

// refusalFlags are the filters of the admin port.
var refusalFlags = []struct{ name, usage string }{
	{"reason", "only refusals for `REASON`, such as no-route"},
	{"target", "only refusals of clients that asked for `NAME[:PORT]`"},
	{"source", "only refusals of clients from `ADDR`, an address or CIDR"},
	{"listener", "only refusals of the listener `ADDR`, as configured"},
	{"limit", "at most `N`"},
}

func newRefusals() *cobra.Command {
	var o refusalsOptions
	cmd := &cobra.Command{
		Use:   "refusals",
		Short: "List the recent refusals of a running gateway, with their reasons",
		Long: `Refusals lists the clients that a running gateway refused recently, with the reason,
the newest first.
Refusals for the same reason, at the same listener, of the same client address and
for the same name are one line with their number. All filters must match.

The gateway keeps the last 16 lines of each of the last 256 clients, in memory.
Its log has every refusal, and the metric culvert_requests_total counts them.

With -o json it prints an object for programs. The guide "Running a gateway"
describes its fields, which are stable.`,
		Example: `  culvert refusals --admin 127.0.0.1:9090
  culvert refusals --admin unix:/run/culvert/admin.sock --reason no-route --source 192.0.2.0/24
  culvert refusals --config culvert.yaml --target orders.example.com --watch
  culvert refusals --admin 127.0.0.1:9090 -o json | jq '.refusals | map({target, reason, count})'`,
		Args: args(0, "no arguments"),
		RunE: func(cmd *cobra.Command, _ []string) error {
			q, err := refusalQuery(cmd)
			if err != nil {
				return err
			}
			return o.watch.run(cmd.Context(), cmd.OutOrStdout(), o.output, func(ctx context.Context, w io.Writer) error {
				return runRefusals(ctx, w, &o, q)
			})
		},
	}
	o.admin.add(cmd)
	for _, f := range refusalFlags {
		cmd.Flags().String(f.name, "", f.usage)
	}
	complete := func(name string, of func(*admin.Refusal) string) {
		_ = cmd.RegisterFlagCompletionFunc(name, func(cmd *cobra.Command, _ []string, _ string) ([]string, cobra.ShellCompDirective) {
			return o.complete(cmd.Context(), of), cobra.ShellCompDirectiveNoFileComp
		})
	}
	complete("reason", func(r *admin.Refusal) string { return string(r.Reason) })
	complete("target", func(r *admin.Refusal) string { return r.Target })
	complete("source", func(r *admin.Refusal) string { return r.Source })
	complete("listener", func(r *admin.Refusal) string { return r.Listener })
	o.watch.add(cmd)
	addOutput(cmd, &o.output)
	return cmd
}

// refusalQuery returns the filters as the admin port takes them. A flag without a
// value is an error, as for tunnels.
func refusalQuery(cmd *cobra.Command) (url.Values, error) {
	q := url.Values{}
	for _, f := range refusalFlags {
		if flag := cmd.Flags().Lookup(f.name); flag.Changed {
			q.Set(f.name, flag.Value.String())
		}
	}
	if _, err := admin.ParseRefusalFilter(q); err != nil {
		return nil, usageError(fmt.Sprintf("see %q", cmd.CommandPath()+" --help"), "%w", err)
	}
	return q, nil
}

func runRefusals(ctx context.Context, w io.Writer, o *refusalsOptions, q url.Values) error {
	c, err := o.admin.client()
	if err != nil {
		return err
	}
	list, err := c.refusals(ctx, q)
	if err != nil {
		return err
	}
	if o.output == "json" {
		return writeJSON(w, list)
	}
	if len(list.Refusals) == 0 {
		what := "no refusal is known"
		if len(q) > 0 {
			what = "no known refusal matches"
		}
		_, err := fmt.Fprintln(w, what)
		return err
	}
	return printRecentRefusals(w, list.Refusals, time.Now())
}

// refusals returns the refusals that q means.
func (c *adminClient) refusals(ctx context.Context, q url.Values) (list admin.Refusals, err error) {
	err = c.ask(ctx, http.MethodGet, "/refusals", q, &list)
	return list, err
}

// complete returns what a shell offers of the refusals: a word of each.
func (o *refusalsOptions) complete(ctx context.Context, of func(*admin.Refusal) string) []string {
	c, err := o.admin.client()
	if err != nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, time.Second)
	defer cancel()
	list, _ := c.refusals(ctx, nil)
	var words []string
	for i := range list.Refusals {
		if word := printable(of(&list.Refusals[i])); word != "" {
			words = append(words, word)
		}
	}
	slices.Sort(words)
	return slices.Compact(words)
}

// printRecentRefusals prints a table.
func printRecentRefusals(w io.Writer, list []admin.Refusal, now time.Time) error {
	rows := [][]string{{"LAST", "COUNT", "REASON", "SOURCE", "TARGET", "LISTENER", "ERROR"}}
	for _, r := range list {
		rows = append(rows, []string{
			humanSeconds(max(0, now.Sub(r.Last).Seconds())), strconv.FormatUint(r.Count, 10), string(r.Reason),
			cmp.Or(printable(r.Source), "-"), cmp.Or(printable(r.Target), "-"), cmp.Or(printable(r.Listener), "-"), cmp.Or(printable(r.Error), "-"),
		})
	}
	return writeTable(w, rows, 0, 1)
}
