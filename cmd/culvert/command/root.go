// Package command is the culvert command line: one file per subcommand, each
// an options struct, a RunE and a plain function that tests call.
package command

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
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
	out := newCleanWriter(stdout)
	root.SetArgs(args)
	root.SetOut(out)
	root.SetErr(stderr) // as it is: logs go there, which are clean by themselves
	callAs(root, os.Args[0])
	err := unknownCommand(root, args)
	if err == nil {
		err = root.ExecuteContext(ctx)
	}
	_ = out.Close()
	if err == nil {
		return exitOK
	}
	err = plainly(err)
	var ce *cliError
	if !errors.As(err, &ce) {
		ce = &cliError{err: err, code: exitFailed}
	}
	if !errors.Is(err, errSilent) {
		complaints := newCleanWriter(stderr)
		fmt.Fprintf(complaints, "culvert: %s %s\n", bad("error:"), ofPackages.Replace(err.Error()))
		if ce.hint != "" {
			fmt.Fprintf(complaints, "culvert: hint: %s\n", ce.hint)
		}
		_ = complaints.Close()
	}
	return ce.code
}

// unknownCommand returns an error where args begin with a word that should be a
// command and is none, whatever flags follow it.
func unknownCommand(root *cobra.Command, args []string) error {
	root.InitDefaultHelpCmd()
	root.InitDefaultCompletionCmd(args...)
	if len(args) > 0 && (args[0] == cobra.ShellCompRequestCmd || args[0] == cobra.ShellCompNoDescRequestCmd) {
		return nil
	}
	if len(args) > 0 && args[0] == "help" {
		args = args[1:]
	}
	cmd, rest, err := root.Find(args)
	if err != nil || !cmd.HasSubCommands() || len(rest) > 0 && strings.HasPrefix(rest[0], "-") {
		return nil
	}
	return subcommand(cmd, rest)
}

// subcommand is the Args of a command that has others: what it is given should
// have been one of them.
func subcommand(cmd *cobra.Command, rest []string) error {
	if len(rest) == 0 {
		return nil
	}
	cmd.SuggestionsMinimumDistance = 2
	var names []string
	for _, s := range cmd.SuggestionsFor(rest[0]) {
		names = append(names, strconv.Quote(s))
	}
	hint := fmt.Sprintf("%q lists the commands", cmd.CommandPath()+" --help")
	if len(names) > 0 {
		hint = "did you mean " + strings.Join(names, " or ") + "?"
	}
	return usageError(hint, "unknown command %q for %q", rest[0], cmd.CommandPath())
}

var (
	exclusiveFlags = regexp.MustCompile(`^if any flags in the group \[.*\] are set none of the others can be; \[(\S+) (\S+)\] were all set$`)
	requiredFlags  = regexp.MustCompile(`^required flag\(s\) "([^"]+)".* not set$`)
)

// ofPackages takes names of packages out of errors: they mean nothing to an
// operator.
var ofPackages = strings.NewReplacer("testca: ", "", "termination: ", "")

// plainly says in plain words what cobra says in its own.
func plainly(err error) error {
	if m := exclusiveFlags.FindStringSubmatch(err.Error()); m != nil {
		// As they are told apart: --config and --route, --admin and --config.
		hint := map[string]string{
			"config route":  "put the route into the file",
			"config routes": "put the routes into the file",
			"config listen": "put the listener into the file",
			"admin config":  "--admin asks a running gateway, and --config reads a file",
		}[m[1]+" "+m[2]]
		return usageError(hint, "--%s and --%s can't be combined", m[1], m[2])
	}
	if m := requiredFlags.FindStringSubmatch(err.Error()); m != nil {
		return usageError("", "--%s is missing", m[1])
	}
	return err
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
	var asked bool // for the version
	root := &cobra.Command{
		Use:   "culvert",
		Short: "Join services across networks without a VPN",
		Long: `Culvert joins services across networks without a VPN. A gateway at a network's
edge reads the name that a client asks for, in the ClientHello of its TLS or in
an HTTP CONNECT, and passes the bytes to the right service inside. TLS is not
decrypted unless the configuration says so: mutual TLS goes end to end.`,
		Example: `  culvert demo --once
  culvert gateway --listen :443 --route orders.example.com=10.0.1.7:8443
  culvert probe orders.example.com --via gateway.example.com:443 --mode sni`,
		SilenceErrors: true,
		SilenceUsage:  true,
		Args:          subcommand,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if asked {
				_, err := io.WriteString(cmd.OutOrStdout(), versionLine())
				return err
			}
			return cmd.Help()
		},
	}
	// Not cobra's own flag: its template would have the linker keep every exported method.
	root.Flags().BoolVarP(&asked, "version", "v", false, "print the version")
	root.SetFlagErrorFunc(func(cmd *cobra.Command, err error) error {
		return usageError(fmt.Sprintf("see %q", cmd.CommandPath()+" --help"), "%w", err)
	})
	addGroup(root, "Run:", newGateway(), newAgent(), newDNS(), newDemo())
	addGroup(root, "Programs and services of this machine:", newConnect(), newExec(), newCapture(), newExpose(), newKubeTools())
	addGroup(root, "Sites and devices:", newInvite(), newJoin(), newPeers(), newDevices())
	addGroup(root, "A running gateway:", newStatus(), newTunnels(), newRefusals(), newConnectors(), newNAT())
	addGroup(root, "Names, routes and policies:", newRegistry(), newResolve(), newExplain(), newExposed(), newPolicy(), newPorts())
	addGroup(root, "Faults:", newDoctor(), newProbe())
	addGroup(root, "Set up:", newConfig(), newInstall(), newCA())
	root.AddCommand(newVersion(), newEnter(), newRestore())
	return root
}

// addGroup adds commands under a heading of the help.
func addGroup(root *cobra.Command, heading string, commands ...*cobra.Command) {
	root.AddGroup(&cobra.Group{ID: heading, Title: heading})
	for _, cmd := range commands {
		cmd.GroupID = heading
	}
	root.AddCommand(commands...)
}

// args makes a positional-argument check a usage error with a hint.
func args(n int, what string) cobra.PositionalArgs {
	return func(cmd *cobra.Command, got []string) error {
		hint := fmt.Sprintf("see %q", cmd.CommandPath()+" --help")
		switch {
		case len(got) == n:
			return nil
		case n == 0:
			return usageError(hint, "%s takes no arguments, and %q was given", cmd.CommandPath(), strings.Join(got, " "))
		case len(got) == 0:
			return usageError(hint, "%s needs %s", cmd.CommandPath(), what)
		}
		return usageError(hint, "%s takes %s, and got %q", cmd.CommandPath(), what, got)
	}
}

// noSuchFile is err in plain words where a file is missing or may not be read.
func noSuchFile(err error) error {
	var pe *fs.PathError
	switch {
	case !errors.As(err, &pe):
	case errors.Is(err, fs.ErrNotExist):
		return fmt.Errorf("%s: no such file", pe.Path)
	case errors.Is(err, fs.ErrPermission):
		return fmt.Errorf("%s: permission denied", pe.Path)
	}
	return err
}
