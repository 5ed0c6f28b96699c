// Package command is the culvert command line: one file per subcommand, each
// an options struct, a RunE and a plain function that tests call.
package command

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"strings"

	"github.com/spf13/cobra"
)

// Exit codes.
const (
	exitOK     = 0
	exitFailed = 1 // it was tried and did not work
	exitUsage  = 2 // what was asked for can't be understood: flags, arguments, configuration
)

// A cliError is an error with what the command line adds to it.
type cliError struct {
	err  error
	hint string
	code int
}

func (e *cliError) Error() string { return e.err.Error() }
func (e *cliError) Unwrap() error { return e.err }

// usageError says that what was asked for can't be understood.
func usageError(hint, format string, args ...any) error {
	return &cliError{err: fmt.Errorf(format, args...), hint: hint, code: exitUsage}
}

// usage makes err an error of exit code 2, with the hint it may have.
func usage(err error) error {
	var ce *cliError
	if errors.As(err, &ce) {
		return err
	}
	return &cliError{err: err, code: exitUsage}
}

// errSilent ends a command with exit code 1 that has said all there is to say.
var errSilent = errors.New("")

// Main runs the command line and returns the exit code.
func Main(ctx context.Context, args []string, stdout, stderr io.Writer) int {
	root := New()
	root.SetArgs(args)
	root.SetOut(stdout)
	root.SetErr(stderr)
	callAs(root, os.Args[0])
	err := root.ExecuteContext(ctx)
	if err == nil {
		return exitOK
	}
	var ce *cliError
	if !errors.As(err, &ce) {
		ce = &cliError{err: err, code: exitFailed}
		for _, cobras := range []string{"unknown command", "required flag", "if any flags in the group"} {
			if strings.HasPrefix(err.Error(), cobras) {
				ce.code = exitUsage
			}
		}
	}
	if err != errSilent {
		fmt.Fprintf(stderr, "culvert: error: %v\n", err)
		if ce.hint != "" {
			fmt.Fprintf(stderr, "culvert: hint: %s\n", ce.hint)
		}
	}
	return ce.code
}

// callAs has the help of root and of all its commands say how the program was
// called: by the name of kubectl's plugin it is "kubectl culvert".
func callAs(root *cobra.Command, program string) {
	const asPlugin = "kubectl culvert"
	if strings.TrimSuffix(filepath.Base(program), ".exe") != "kubectl-culvert" {
		return
	}
	root.Annotations = map[string]string{cobra.CommandDisplayNameAnnotation: asPlugin}
	line := regexp.MustCompile(`(?m)^(  |.*\| )culvert `)
	var each func(cmd *cobra.Command)
	each = func(cmd *cobra.Command) {
		cmd.Example = line.ReplaceAllString(cmd.Example, "${1}"+asPlugin+" ")
		for _, sub := range cmd.Commands() {
			each(sub)
		}
	}
	each(root)
}

// New returns the root command.
func New() *cobra.Command {
	root := &cobra.Command{
		Use:   "culvert",
		Short: "Join services across networks without a VPN",
		Long: `Culvert is a gateway at a network's edge. It reads the name a client asks for,
in the ClientHello of its TLS or in an HTTP CONNECT, and passes the bytes to the
right service inside. It never decrypts: mutual TLS goes end to end.`,
		Example: `  culvert demo --once
  culvert gateway --listen :443 --route orders.example.com=10.0.1.7:8443
  culvert probe orders.example.com --via gateway.example.com:443 --mode sni`,
		SilenceErrors: true,
		SilenceUsage:  true,
		Args:          cobra.NoArgs,
		RunE:          func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	root.SetFlagErrorFunc(func(cmd *cobra.Command, err error) error {
		return usageError(fmt.Sprintf("see %q", cmd.CommandPath()+" --help"), "%w", err)
	})
	root.AddCommand(newGateway(), newDNS(), newProbe(), newExplain(), newStatus(), newTunnels(), newPorts(), newResolve(), newRegistry(), newConfig(), newCA(), newInstall(), newDemo(), newVersion())
	return root
}

// args makes a positional-argument check a usage error with a hint.
func args(n int, what string) cobra.PositionalArgs {
	return func(cmd *cobra.Command, got []string) error {
		if len(got) != n {
			return usageError(fmt.Sprintf("see %q", cmd.CommandPath()+" --help"), "%s wants %s, got %d arguments", cmd.CommandPath(), what, len(got))
		}
		return nil
	}
}
