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
	"strings"
	"time"

	"github.com/spf13/cobra"

	"culvert.dev/internal/admin"
)

type tunnelsOptions struct {
	admin  adminOptions
	filter tunnelFilter
	sort   string
	watch  watchFlag
	output string
}

func newTunnels() *cobra.Command {
	var o tunnelsOptions
	cmd := &cobra.Command{
		Use:   "tunnels",
		Short: "List the open tunnels of a running gateway, or close some",
		Long: `Tunnels lists the open tunnels of a running gateway: the client, the service, the
age, the time since the last byte and the bytes carried. All filters must match.
IN is what the client has sent, OUT what the service has sent.

With -o json it prints an array of objects for programs. The guide "Running a
gateway" describes their fields, which are stable.`,
		Example: `  culvert tunnels --admin 127.0.0.1:9090
  culvert tunnels --admin unix:/run/culvert/admin.sock --service orders.example.com --source 192.0.2.0/24
  culvert tunnels --config culvert.yaml --quiet-for 10m --sort idle --limit 20
  culvert tunnels --admin 127.0.0.1:9090 -o json | jq 'group_by(.service) | map({(.[0].service): length})'
  culvert tunnels close 4711 --admin unix:/run/culvert/admin.sock`,
		Args: args(0, "no arguments"),
		RunE: func(cmd *cobra.Command, _ []string) error {
			return o.watch.run(cmd.Context(), cmd.OutOrStdout(), o.output, func(ctx context.Context, w io.Writer) error {
				return runTunnels(ctx, w, &o)
			})
		},
	}
	o.admin.add(cmd)
	o.filter.add(cmd, &o.admin)
	cmd.Flags().StringVar(&o.sort, "sort", "id", "`COLUMN` to sort by: "+strings.Join(sortKeys(), ", ")+"; largest numbers first")
	_ = cmd.RegisterFlagCompletionFunc("sort", cobra.FixedCompletions(sortKeys(), cobra.ShellCompDirectiveNoFileComp))
	o.watch.add(cmd)
	addOutput(cmd, &o.output)
	cmd.AddCommand(newTunnelsClose(&o.admin))
	return cmd
}

func runTunnels(ctx context.Context, w io.Writer, o *tunnelsOptions) error {
	compare, ok := tunnelOrders[o.sort]
	if !ok {
		return usageError("use "+strings.Join(sortKeys(), ", "), "--sort %q", o.sort)
	}
	q, f, err := o.filter.query()
	if err != nil {
		return err
	}
	c, err := o.admin.client()
	if err != nil {
		return err
	}
	if o.sort != "id" {
		q.Del("limit") // of the sorted ones
	}
	list, err := c.tunnels(ctx, q)
	if err != nil {
		return err
	}
	slices.SortStableFunc(list, compare)
	if f.Limit > 0 && len(list) > f.Limit {
		list = list[:f.Limit]
	}
	if o.output == "json" {
		return writeJSON(w, list)
	}
	if len(list) == 0 {
		what := "no tunnel is open"
		if f.Narrows() {
			what = "no open tunnel matches"
		}
		_, err := fmt.Fprintln(w, what)
		return err
	}
	return printTunnels(w, list)
}

// tunnels returns the open tunnels that q means, never nil.
func (c *adminClient) tunnels(ctx context.Context, q url.Values) ([]admin.Tunnel, error) {
	list := []admin.Tunnel{}
	if err := c.ask(ctx, http.MethodGet, "/tunnels", q, &list); err != nil {
		return nil, err
	}
	return list, nil
}

// A tunnelFilter is the flags that say which tunnels are meant.
type tunnelFilter struct{ cmd *cobra.Command }

// tunnelProtocols are those of listeners, and of ports for one service.
var tunnelProtocols = allProtocols

var filterFlags = []struct{ name, usage string }{
	{"service", "only tunnels of the service `NAME`"},
	{"target", "only tunnels that asked for `NAME[:PORT]`"},
	{"source", "only tunnels from `ADDR`, an address or CIDR"},
	{"peer", "only tunnels of the user `NAME`"},
	{"proto", "only tunnels by `PROTOCOL`: " + oneOf(tunnelProtocols)},
	{"listener", "only tunnels of the listener `ADDR`, as configured"},
	{"endpoint", "only tunnels to `ENDPOINT`: its address, with or without port, or DNS name"},
	{"older-than", "only tunnels open for at least `DURATION`"},
	{"quiet-for", "only tunnels without a byte for at least `DURATION`"},
	{"min-bytes", "only tunnels that have carried at least `N` bytes in both directions together, such as 10MiB"},
	{"limit", "at most `N` tunnels"},
}

func (t *tunnelFilter) add(cmd *cobra.Command, o *adminOptions) {
	t.cmd = cmd
	for _, f := range filterFlags {
		cmd.Flags().String(f.name, "", f.usage)
	}
	_ = cmd.RegisterFlagCompletionFunc("proto", cobra.FixedCompletions(tunnelProtocols, cobra.ShellCompDirectiveNoFileComp))
	complete := func(name string, of func(*admin.Tunnel) string) {
		_ = cmd.RegisterFlagCompletionFunc(name, func(cmd *cobra.Command, _ []string, _ string) ([]string, cobra.ShellCompDirective) {
			return o.complete(cmd.Context(), of), cobra.ShellCompDirectiveNoFileComp
		})
	}
	complete("service", func(t *admin.Tunnel) string { return t.Service })
	complete("target", func(t *admin.Tunnel) string { return t.Target })
	complete("peer", func(t *admin.Tunnel) string { return t.Peer })
	complete("listener", func(t *admin.Tunnel) string { return t.Listener })
	complete("endpoint", func(t *admin.Tunnel) string { return t.Endpoint })
}

// query returns the filter as the admin port takes it, and as it understands
// it. A flag that is given without a value is an error and not left out: it may
// be a shell's variable that nobody has set.
func (t *tunnelFilter) query() (url.Values, admin.TunnelFilter, error) {
	q := url.Values{}
	for _, f := range filterFlags {
		if flag := t.cmd.Flags().Lookup(f.name); flag.Changed {
			q.Set(f.name, flag.Value.String())
		}
	}
	if proto := q.Get("proto"); proto != "" && !slices.Contains(tunnelProtocols, proto) {
		return q, admin.TunnelFilter{}, usageError("use "+oneOf(tunnelProtocols), "--proto %q", proto)
	}
	f, err := admin.ParseTunnelFilter(q)
	if err != nil {
		err = usageError(fmt.Sprintf("see %q", t.cmd.CommandPath()+" --help"), "%w", err)
	}
	return q, f, err
}

// complete returns what a shell offers of the open tunnels: a word of each,
// and after a tab what it is.
func (o *adminOptions) complete(ctx context.Context, of func(*admin.Tunnel) string) []string {
	c, err := o.client()
	if err != nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, time.Second)
	defer cancel()
	list, _ := c.tunnels(ctx, url.Values{"limit": {"1000"}})
	var words []string
	for i := range list {
		word, note, noted := strings.Cut(of(&list[i]), "\t")
		if word = printable(word); noted {
			word += "\t" + printable(note)
		}
		if word != "" {
			words = append(words, word)
		}
	}
	slices.Sort(words)
	return slices.Compact(words)
}

// tunnelOrders are the ways to sort tunnels: texts from a, ages and bytes from
// the largest.
var tunnelOrders = map[string]func(a, b admin.Tunnel) int{
	"id":       func(a, b admin.Tunnel) int { return cmp.Compare(a.ID, b.ID) },
	"age":      func(a, b admin.Tunnel) int { return cmp.Compare(b.Age, a.Age) },
	"idle":     func(a, b admin.Tunnel) int { return cmp.Compare(b.Quiet, a.Quiet) },
	"proto":    func(a, b admin.Tunnel) int { return cmp.Compare(a.Proto, b.Proto) },
	"source":   func(a, b admin.Tunnel) int { return cmp.Compare(a.Source, b.Source) },
	"target":   func(a, b admin.Tunnel) int { return cmp.Compare(a.Target, b.Target) },
	"service":  func(a, b admin.Tunnel) int { return cmp.Compare(a.Service, b.Service) },
	"endpoint": func(a, b admin.Tunnel) int { return cmp.Compare(a.Endpoint, b.Endpoint) },
	"in":       func(a, b admin.Tunnel) int { return cmp.Compare(b.BytesIn, a.BytesIn) },
	"out":      func(a, b admin.Tunnel) int { return cmp.Compare(b.BytesOut, a.BytesOut) },
	"bytes":    func(a, b admin.Tunnel) int { return cmp.Compare(b.BytesIn+b.BytesOut, a.BytesIn+a.BytesOut) },
}

func sortKeys() []string {
	return []string{"id", "age", "idle", "proto", "source", "target", "service", "endpoint", "in", "out", "bytes"}
}

// tunnelColumns are the table's. Numbers stand at the right.
var tunnelColumns = []struct {
	head  string
	right bool
	of    func(t *admin.Tunnel) string
}{
	{"ID", true, func(t *admin.Tunnel) string { return strconv.FormatUint(t.ID, 10) }},
	{"AGE", true, func(t *admin.Tunnel) string { return humanSeconds(t.Age) }},
	{"IDLE", true, func(t *admin.Tunnel) string { return humanSeconds(t.Quiet) }},
	{"PROTO", false, func(t *admin.Tunnel) string { return t.Proto }},
	{"SOURCE", false, func(t *admin.Tunnel) string { return t.Source }},
	{"TARGET", false, func(t *admin.Tunnel) string { return t.Target }},
	{"SERVICE", false, func(t *admin.Tunnel) string { return t.Service }},
	{"ENDPOINT", false, func(t *admin.Tunnel) string { return t.Endpoint }},
	{"IN", true, func(t *admin.Tunnel) string { return humanBytes(t.BytesIn) }},
	{"OUT", true, func(t *admin.Tunnel) string { return humanBytes(t.BytesOut) }},
	{"STATE", false, func(t *admin.Tunnel) string {
		if t.HalfClosed {
			return "half-closed"
		}
		return "open"
	}},
}

// printTunnels prints a table.
func printTunnels(w io.Writer, list []admin.Tunnel) error {
	rows := make([][]string, len(list)+1)
	var right []int
	for j, col := range tunnelColumns {
		rows[0] = append(rows[0], col.head)
		if col.right {
			right = append(right, j)
		}
	}
	for i := range list {
		for _, col := range tunnelColumns {
			rows[i+1] = append(rows[i+1], cmp.Or(printable(col.of(&list[i])), "-"))
		}
	}
	return writeTable(w, rows, right...)
}

// humanSeconds writes a time with its two largest units.
func humanSeconds(s float64) string {
	n := int64(s)
	switch {
	case n < 60:
		return fmt.Sprintf("%ds", n)
	case n < 60*60:
		return fmt.Sprintf("%dm%02ds", n/60, n%60)
	case n < 24*60*60:
		return fmt.Sprintf("%dh%02dm", n/(60*60), n/60%60)
	}
	return fmt.Sprintf("%dd%02dh", n/(24*60*60), n/(60*60)%24)
}

// humanBytes writes a number of bytes with one decimal at the most.
func humanBytes(n int64) string {
	if n < 1<<10 {
		return fmt.Sprintf("%d B", n)
	}
	v, unit := float64(n)/(1<<10), 0
	for v >= 1023.95 && unit < 4 { // which would be written as 1024.0
		v, unit = v/(1<<10), unit+1
	}
	return fmt.Sprintf("%.1f %ciB", v, "KMGTP"[unit])
}
