package command

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strconv"
	"time"

	"github.com/spf13/cobra"

	"culvert.dev/internal/gateway"
	"culvert.dev/internal/statefile"
	"culvert.dev/registry"
	"culvert.dev/registry/file"
	"culvert.dev/tunnel"
)

type portsOptions struct {
	admin  string
	config string
	output string
}

func newPorts() *cobra.Command {
	var o portsOptions
	cmd := &cobra.Command{
		Use:   "ports [NAME...]",
		Short: "List the ports assigned to services",
		Long: `Ports lists the port that servicePorts has assigned to each service, or to the
named ones. With --admin it asks a running gateway; otherwise it reads the
configuration and the state file, shows the ports that new services would get,
and opens none.

STATE is open, or assigned without a gateway; held if another process has the
port; full if no port is left; failed for any other error; new for a port that
would be assigned; and kept for the port of a removed service, which stays
reserved.

The exit code is 1 if a named service has no port.`,
		Example: `  culvert ports --admin unix:/run/culvert/admin.sock
  culvert ports --config culvert.yaml
  culvert ports db.example.com --admin 127.0.0.1:9090 -o json | jq '.[].assigned'`,
		ValidArgsFunction: func(cmd *cobra.Command, _ []string, _ string) ([]string, cobra.ShellCompDirective) {
			return completeNames(cmd.Context(), o.admin, o.config, nil)
		},
		RunE: func(cmd *cobra.Command, names []string) error {
			return runPorts(cmd.Context(), cmd.OutOrStdout(), &o, names)
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

func runPorts(ctx context.Context, w io.Writer, o *portsOptions, names []string) error {
	var status *gateway.StatusPorts
	var err error
	if o.config == "" {
		status, err = askPorts(ctx, o.admin)
	} else {
		status, err = readPorts(o.config)
	}
	if err != nil {
		return err
	}
	list, err := namedPorts(status.Ports, names)
	if err != nil {
		return err
	}
	if o.output == "json" {
		err = writeJSON(w, list)
	} else {
		err = printPorts(w, status.Range, list)
	}
	if err == nil && len(names) > 0 && !slices.ContainsFunc(list, func(s gateway.ServicePort) bool { return s.Assigned != 0 }) {
		return errSilent
	}
	return err
}

// askPorts asks a running gateway.
func askPorts(ctx context.Context, addr string) (*gateway.StatusPorts, error) {
	c, err := askedGateway(addr)
	if err != nil {
		return nil, err
	}
	s, err := c.status(ctx)
	if err != nil {
		return nil, err
	}
	if s.ServicePorts == nil {
		return nil, noServicePorts("the gateway assigns no ports to services", "its configuration")
	}
	return s.ServicePorts, nil
}

// readPorts looks at the configuration and the state.
func readPorts(path string) (*gateway.StatusPorts, error) {
	c, err := file.Load(path)
	if err != nil {
		return nil, usage(err)
	}
	cfg := servicePorts(c)
	if cfg == nil {
		return nil, noServicePorts(path+" assigns no ports to services", "it")
	}
	t, err := registry.Merge(c.Snapshot())
	if err != nil {
		return nil, usage(err)
	}
	list, err := gateway.ForecastPorts(*cfg, t)
	if err != nil {
		return nil, stateError(err)
	}
	return &gateway.StatusPorts{Range: cfg.Range.String(), Ports: list}, nil
}

func noServicePorts(what, where string) error {
	return &cliError{
		err:  errors.New(what),
		hint: "add servicePorts: {range: 20000-20999, state: /var/lib/culvert/ports.json} to " + where,
		code: exitFailed,
	}
}

// stateError adds a hint to an error of the state.
func stateError(err error) error {
	state, ok := errors.AsType[*gateway.StateError](err)
	if !ok {
		return err
	}
	hint := "restore the file, or fix its permissions; if it is removed, " + state.What + " are assigned again and may differ from those that clients use"
	if errors.Is(err, statefile.ErrHeld) {
		hint = "stop the other process (fuser FILE.lock names it), or give each a state file of its own; a gateway answers DNS too, if its file has dns:"
	}
	return &cliError{err: err, hint: hint, code: exitFailed}
}

// namedPorts returns those of list that are of the named services; all of them
// where none is named.
func namedPorts(list []gateway.ServicePort, names []string) ([]gateway.ServicePort, error) {
	if len(names) == 0 {
		return list, nil
	}
	var some []gateway.ServicePort
	for _, text := range names {
		name, err := tunnel.ParseName(text)
		if err != nil {
			return nil, usageError("write the name that clients ask for", "%q: %w", text, err)
		}
		before := len(some)
		for _, s := range list {
			if s.Name == name.String() || s.Service == name.String() {
				some = append(some, s)
			}
		}
		if len(some) == before {
			return nil, &cliError{
				err:  fmt.Errorf("no port is assigned to %q", text),
				hint: "a service gets one if it is exposed, has a name without *, and not ownPort: false",
				code: exitFailed,
			}
		}
	}
	return some, nil
}

// printPorts prints a table, and the troubles below it.
func printPorts(w io.Writer, of string, list []gateway.ServicePort) error {
	if len(list) == 0 {
		_, err := fmt.Fprintf(w, "no service has a port of its own; the range is %s\n", of)
		return err
	}
	rows := [][]string{{"PORT", "NAME", "SERVICE PORT", "PROTOCOL", "STATE", "LISTENS AT"}}
	for _, s := range list {
		port, its, at := "-", "any", "-"
		if s.Assigned != 0 {
			port = strconv.Itoa(int(s.Assigned))
		}
		if s.Port != 0 {
			its = strconv.Itoa(int(s.Port))
		}
		if s.State == gateway.PortOpen {
			at = s.Address
		}
		state := s.State
		if !s.Until.IsZero() {
			state += " until " + s.Until.UTC().Format(time.RFC3339)
		}
		rows = append(rows, []string{port, printable(s.Name), its, s.Protocol, state, at})
	}
	if err := writeTable(w, rows, 0); err != nil {
		return err
	}
	for _, s := range list {
		if s.Problem == "" {
			continue
		}
		if _, err := fmt.Fprintf(w, "%s: %s\n", printable(s.Name), printable(s.Problem)); err != nil {
			return err
		}
	}
	return nil
}
