package command

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"culvert.dev/internal/admin"
)

// atOnce is how many IDs one request names, so that its head stays below the
// admin port's limit.
const atOnce = 400

type closeOptions struct {
	admin  *adminOptions
	filter tunnelFilter
	ids    []string
	dryRun bool
	output string
}

func newTunnelsClose(a *adminOptions) *cobra.Command {
	o := closeOptions{admin: a}
	cmd := &cobra.Command{
		Use:   "close [ID...]",
		Short: "Close open tunnels, by ID or by a filter",
		Long: `Close ends tunnels of a running gateway: those with the given IDs, or those that
match all filters. Both sides get a reset, not an end of stream, and the log
line of each has the reason "killed". A client may reconnect: this does not
keep it out.

A gateway closes tunnels over the socket of its admin port, and over TCP only
if it was started with --admin-control.`,
		Example: `  culvert tunnels close 4711 4712 --admin unix:/run/culvert/admin.sock
  culvert tunnels close --service orders.example.com --admin unix:/run/culvert/admin.sock --dry-run
  culvert tunnels close --source 192.0.2.7 --older-than 1h --config culvert.yaml`,
		RunE: func(cmd *cobra.Command, ids []string) error {
			o.ids = ids
			return runTunnelsClose(cmd.Context(), cmd.OutOrStdout(), &o)
		},
		ValidArgsFunction: func(cmd *cobra.Command, _ []string, _ string) ([]string, cobra.ShellCompDirective) {
			return a.complete(cmd.Context(), func(t *admin.Tunnel) string {
				return fmt.Sprintf("%d\t%s %s", t.ID, t.Source, t.Target)
			}), cobra.ShellCompDirectiveNoFileComp
		},
	}
	o.filter.add(cmd, a)
	cmd.Flags().BoolVar(&o.dryRun, "dry-run", false, "show the tunnels that would be closed, and close none")
	addOutput(cmd, &o.output)
	return cmd
}

func runTunnelsClose(ctx context.Context, w io.Writer, o *closeOptions) error {
	q, f, err := o.filter.query()
	if err != nil {
		return err
	}
	questions := []url.Values{q}
	switch {
	case len(o.ids) > 0 && len(q) > 0:
		return usageError("give their IDs, or filters", "both IDs and filters")
	case len(o.ids) > 0:
		if questions, f, err = byID(o.ids); err != nil {
			return err
		}
	case !f.Narrows():
		return usageError(`give IDs, as "culvert tunnels" shows them, or a filter such as --service NAME`, "which tunnels?")
	}
	c, err := o.admin.client()
	if err != nil {
		return err
	}
	if o.dryRun {
		return dryRun(ctx, w, c, questions, f.IDs, o.output)
	}
	done := admin.Closed{Closed: []uint64{}}
	for _, q := range questions {
		ids, err := c.close(ctx, q)
		if err != nil {
			return err
		}
		done.Closed = append(done.Closed, ids...)
	}
	switch {
	case o.output == "json":
		err = writeJSON(w, done)
	case len(done.Closed) > 0 || len(f.IDs) == 0:
		_, err = fmt.Fprintf(w, "closed %s\n", count(len(done.Closed)))
	}
	if err != nil {
		return err
	}
	return missing(f.IDs, done.Closed)
}

// byID makes the questions for tunnels that are named.
func byID(ids []string) (questions []url.Values, f admin.TunnelFilter, err error) {
	if f, err = admin.ParseTunnelFilter(url.Values{"id": ids}); err != nil {
		return nil, f, usageError(`"culvert tunnels" shows the IDs`, "%w", err)
	}
	slices.Sort(f.IDs)
	f.IDs = slices.Compact(f.IDs)
	for some := range slices.Chunk(f.IDs, atOnce) {
		q := url.Values{}
		for _, id := range some {
			q.Add("id", strconv.FormatUint(id, 10))
		}
		questions = append(questions, q)
	}
	return questions, f, nil
}

// close closes the tunnels that q means and returns their IDs.
func (c *adminClient) close(ctx context.Context, q url.Values) ([]uint64, error) {
	var done admin.Closed
	if err := c.ask(ctx, http.MethodDelete, "/tunnels", q, &done); err != nil {
		return nil, err
	}
	return done.Closed, nil
}

// dryRun shows the tunnels that would be closed.
func dryRun(ctx context.Context, w io.Writer, c *adminClient, questions []url.Values, named []uint64, output string) error {
	list := []admin.Tunnel{}
	for _, q := range questions {
		some, err := c.tunnels(ctx, q)
		if err != nil {
			return err
		}
		list = append(list, some...)
	}
	var err error
	if output == "json" {
		err = writeJSON(w, list)
	} else {
		if len(list) > 0 {
			err = printTunnels(w, list)
		}
		if err == nil && (len(list) > 0 || len(named) == 0) {
			_, err = fmt.Fprintf(w, "would close %s\n", count(len(list)))
		}
	}
	if err != nil {
		return err
	}
	found := make([]uint64, len(list))
	for i := range list {
		found[i] = list[i].ID
	}
	return missing(named, found)
}

// missing complains of tunnels that were named and are not there.
func missing(named, found []uint64) error {
	var gone []string
	for _, id := range named {
		if !slices.Contains(found, id) {
			gone = append(gone, strconv.FormatUint(id, 10))
		}
	}
	const hint = `it may have ended on its own: "culvert tunnels" shows those that are open, and the log how others ended`
	switch len(gone) {
	case 0:
		return nil
	case 1:
		return &cliError{err: fmt.Errorf("no tunnel %s is open", gone[0]), hint: hint, code: exitFailed}
	}
	return &cliError{err: fmt.Errorf("no tunnels %s are open", strings.Join(gone, ", ")), hint: hint, code: exitFailed}
}

func count(n int) string {
	switch n {
	case 0:
		return "no tunnel: none matches"
	case 1:
		return "1 tunnel"
	}
	return fmt.Sprintf("%d tunnels", n)
}
