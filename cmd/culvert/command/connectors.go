package command

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"culvert.dev/internal/gateway"
	"culvert.dev/reverse"
	"culvert.dev/tunnel"
)

type connectorsOptions struct {
	admin  adminOptions
	watch  watchFlag
	output string
}

func newConnectors() *cobra.Command {
	var o connectorsOptions
	cmd := &cobra.Command{
		Use:   "connectors",
		Short: "List the connectors that have a reverse session to a running gateway",
		Long: `Connectors lists the reverse sessions to a running gateway, the oldest first, and
the names that they serve, and those that they ask for and are refused, with the
reason. Names with several connectors, which share the requests, are listed with
their number: they are replicas, or the same credentials are used twice. Names
whose sessions are to another replica of the gateway are listed with that replica.
Names whose last session has ended are listed as long as they are kept for their
owner.

With -o json it prints an object for programs, with the sessions and the names.`,
		Example: `  culvert connectors --admin 127.0.0.1:9090
  culvert connectors --config culvert.yaml --watch
  culvert connectors --admin unix:/run/culvert/admin.sock -o json | jq '.names | map({name, owner})'`,
		Args: args(0, "no arguments"),
		RunE: func(cmd *cobra.Command, _ []string) error {
			return o.watch.run(cmd.Context(), cmd.OutOrStdout(), o.output, func(ctx context.Context, w io.Writer) error {
				return runConnectors(ctx, w, &o)
			})
		},
	}
	o.admin.add(cmd)
	o.watch.add(cmd)
	addOutput(cmd, &o.output)
	return cmd
}

func runConnectors(ctx context.Context, w io.Writer, o *connectorsOptions) error {
	c, err := o.admin.client()
	if err != nil {
		return err
	}
	list, err := c.connectors(ctx)
	if err != nil {
		return err
	}
	if o.output == "json" {
		return writeJSON(w, list)
	}
	return printConnectors(w, &list, time.Now())
}

// connectors returns the sessions of connectors and their names.
func (c *adminClient) connectors(ctx context.Context) (list gateway.Connectors, err error) {
	err = c.ask(ctx, http.MethodGet, "/connectors", nil, &list)
	return list, err
}

// printConnectors prints list: the sessions, and the names that have none.
func printConnectors(w io.Writer, list *gateway.Connectors, now time.Time) error {
	const most = 5 // names in a line
	if len(list.Sessions) == 0 {
		if _, err := fmt.Fprintln(w, "no connector has a session"); err != nil {
			return err
		}
	} else {
		rows := [][]string{{"ID", "AGE", "STREAMS", "OWNER", "SOURCE", "PROTOCOL", "NAMES"}}
		for i := range list.Sessions {
			s := &list.Sessions[i]
			var names []string
			for _, n := range s.Names {
				names = append(names, namePort(n.Name, n.Port))
			}
			text := strings.Join(names[:min(most, len(names))], ", ")
			if n := len(names) - most; n > 0 {
				text += fmt.Sprintf(" and %d more", n)
			}
			if refused := refusedNames(s.Refused); refused != "" {
				text = strings.TrimPrefix(text+"; "+refused, "; ")
			}
			if s.Draining {
				text += " (draining)"
			}
			rows = append(rows, []string{
				strconv.FormatUint(s.ID, 10), humanSeconds(max(0, now.Sub(s.Since).Seconds())), strconv.Itoa(s.Streams),
				printable(s.Owner), printable(s.Source), printable(s.Protocol), printable(text),
			})
		}
		if err := writeTable(w, rows, 0, 1, 2); err != nil {
			return err
		}
	}
	if err := printShared(w, list.Names); err != nil {
		return err
	}
	for i := range list.Names {
		n := &list.Names[i]
		for _, r := range n.Replicas {
			if _, err := fmt.Fprintf(w, "%s has %s to replica %s at %s\n", printable(n.Name), plural(r.Sessions, "session"), printable(r.Replica), printable(r.Address)); err != nil {
				return err
			}
		}
	}
	kept := slices.DeleteFunc(slices.Clone(list.Names), func(n gateway.ConnectorName) bool { return n.Sessions > 0 || len(n.Replicas) > 0 })
	for _, n := range kept {
		left := humanSeconds(max(0, n.Until.Sub(now).Seconds()))
		if _, err := fmt.Fprintf(w, "%s has no session, and is kept for %s for %s\n", printable(n.Name), printable(n.Owner), left); err != nil {
			return err
		}
	}
	return nil
}

// refusedNames says which names a connector has asked for and does not have, and why; "" for none.
func refusedNames(refused []reverse.Result) string {
	const most = 3
	var all []string
	for i := range refused[:min(most, len(refused))] {
		r := &refused[i]
		all = append(all, fmt.Sprintf("%s (%s)", namePort(r.Name, r.Port), r.Reason))
	}
	switch more := len(refused) - most; {
	case len(all) == 0:
		return ""
	case more > 0:
		return fmt.Sprintf("refused: %s and %d more", strings.Join(all, ", "), more)
	}
	return "refused: " + strings.Join(all, ", ")
}

// namePort is a name as a connector registers it, for any port where port is 0.
func namePort(name tunnel.Pattern, port uint16) string {
	if port == 0 {
		return name.String()
	}
	return name.String() + ":" + strconv.Itoa(int(port))
}

// printShared prints the names that have several connectors. They may be replicas of a service, or
// somebody uses the credentials of another connector.
func printShared(w io.Writer, names []gateway.ConnectorName) error {
	const most = 5
	shared := slices.DeleteFunc(slices.Clone(names), func(n gateway.ConnectorName) bool { return n.Connectors < 2 })
	for _, n := range shared[:min(most, len(shared))] {
		if _, err := fmt.Fprintf(w, "%s has %d connectors, which share its requests\n", printable(n.Name), n.Connectors); err != nil {
			return err
		}
	}
	if more := len(shared) - most; more > 0 {
		_, err := fmt.Fprintf(w, "%s more have several connectors, too\n", plural(more, "name"))
		return err
	}
	return nil
}
