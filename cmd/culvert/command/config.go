package command

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"strings"

	"github.com/spf13/cobra"

	"culvert.dev/internal/gateway/inbound"
	"culvert.dev/registry"
	"culvert.dev/registry/file"
)

func newConfig() *cobra.Command {
	cmd := &cobra.Command{
		Use:     "config",
		Short:   "Check a configuration file, or print its JSON schema",
		Example: "  culvert config check culvert.yaml\n  culvert config schema > culvert.schema.json",
		Args:    subcommand,
		RunE:    func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	var output string
	check := &cobra.Command{
		Use:   "check FILE...",
		Short: "Check configuration files",
		Long: `Check reads configuration files as a gateway would and lists every mistake with
its line, its column and a hint. The file "-" is standard input; paths in it are
relative to the current folder. The exit code is 0 if all files are valid, and 2
if a gateway would refuse one.`,
		Example: "  culvert config check culvert.yaml\n  culvert config check sites/*.yaml\n  render | culvert config check - -o json",
		Args: func(cmd *cobra.Command, a []string) error {
			if len(a) > 0 {
				return nil
			}
			return args(1, "one FILE or more")(cmd, a)
		},
		RunE: func(cmd *cobra.Command, a []string) error {
			return checkConfigs(cmd.InOrStdin(), cmd.OutOrStdout(), a, output == "json")
		},
	}
	addOutput(check, &output)
	schema := &cobra.Command{
		Use:     "schema",
		Short:   "Print the JSON schema of the configuration file, for editors",
		Example: "  culvert config schema > culvert.schema.json",
		Args:    args(0, "no arguments"),
		RunE: func(cmd *cobra.Command, _ []string) error {
			_, err := io.WriteString(cmd.OutOrStdout(), file.Schema)
			return err
		},
	}
	cmd.AddCommand(check, schema, newPassword())
	return cmd
}

func newPassword() *cobra.Command {
	return &cobra.Command{
		Use:   "password NAME",
		Short: "Hash a password for a listener's users file",
		Long: `Password reads a password, a line on standard input, and prints the line that a
listener's usersFile wants: the name and a bcrypt hash.`,
		Example: "  echo wonderland | culvert config password alice >> users.txt",
		Args:    args(1, "one NAME"),
		RunE: func(cmd *cobra.Command, a []string) error {
			return hashPassword(cmd.InOrStdin(), cmd.OutOrStdout(), a[0])
		},
	}
}

func hashPassword(r io.Reader, w io.Writer, name string) error {
	line, err := bufio.NewReader(io.LimitReader(r, 1024)).ReadString('\n')
	if err != nil && err != io.EOF {
		return err
	}
	password := strings.TrimRight(line, "\r\n")
	if password == "" {
		return usageError("echo PASSWORD | culvert config password NAME", "no password on standard input")
	}
	if name == "" || strings.ContainsAny(name, ":$\r\n") {
		return usageError("use letters and digits", "%q cannot be a user name", name)
	}
	hash, err := inbound.HashPassword(password)
	if err != nil {
		return usageError("bcrypt takes at most 72 bytes", "%w", err)
	}
	_, err = fmt.Fprintf(w, "%s:%s\n", name, hash)
	return err
}

// A checkedFile is what "culvert config check -o json" prints of a file.
type checkedFile struct {
	File      string         `json:"file"`
	Good      bool           `json:"good"`
	Listeners int            `json:"listeners"`
	Services  int            `json:"services"`
	DNS       int            `json:"dns"`     // addresses
	Exposed   int            `json:"exposed"` // names on other gateways, by reverse
	Mistakes  []checkMistake `json:"mistakes,omitempty"`
	Warnings  []checkMistake `json:"warnings,omitempty"` // of what is no mistake, and hardly meant
}

// A checkMistake is one of a file; the line is 0 where it is of the whole.
type checkMistake struct {
	Line    int    `json:"line,omitempty"`
	Column  int    `json:"column,omitempty"`
	Message string `json:"message"`
	Hint    string `json:"hint,omitempty"`
}

func checkConfigs(stdin io.Reader, w io.Writer, paths []string, asJSON bool) error {
	list := []checkedFile{}
	var failed []error
	for _, path := range paths {
		f := checkedFile{File: path}
		c, err := checkConfig(stdin, path)
		if err == nil {
			f.Good, f.Listeners, f.Services = true, len(c.Listeners), len(c.Services)
			if c.DNS != nil {
				f.DNS = len(c.DNS.Listeners)
			}
			if c.Reverse != nil {
				f.Exposed = len(c.Reverse.Expose)
			}
			for _, warning := range c.Warnings {
				f.Warnings = append(f.Warnings, checkMistake{warning.Line, warning.Column, warning.Msg, warning.Hint})
				if !asJSON {
					fmt.Fprintln(w, "warning:", warning)
				}
			}
		} else {
			f.Mistakes = mistakesOf(err)
			failed = append(failed, err)
		}
		list = append(list, f)
		if f.Good && !asJSON {
			dns := ""
			if c.DNS != nil {
				dns = fmt.Sprintf(", DNS at %d addresses", f.DNS)
			}
			exposed := ""
			if c.Reverse != nil {
				exposed = fmt.Sprintf(", %s exposed on %s", plural(f.Exposed, "name"), plural(len(c.Reverse.Gateways), "gateway"))
			}
			fmt.Fprintf(w, "%s: %s (%s, %s%s%s)\n", path, good("OK"), plural(f.Listeners, "listener"), plural(f.Services, "service"), exposed, dns)
		}
	}
	if asJSON {
		if err := writeJSON(w, list); err != nil {
			return err
		}
	}
	switch {
	case len(failed) == 0:
		return nil
	case asJSON: // which says all there is to say
		return &cliError{err: errSilent, code: exitUsage}
	case len(failed) == 1:
		return failed[0]
	}
	return &cliError{err: errors.Join(failed...), hint: fmt.Sprintf("%d of %d files have mistakes", len(failed), len(paths)), code: exitUsage}
}

// checkConfig reads one file as a gateway would.
func checkConfig(stdin io.Reader, path string) (*file.Config, error) {
	var c *file.Config
	var err error
	if path == "-" {
		c, err = file.LoadFrom(path, stdin)
	} else {
		c, err = file.Load(path)
	}
	if err != nil {
		return nil, &cliError{err: err, code: exitUsage}
	}
	if _, err := gatewayConfig(c); err != nil {
		return nil, usage(err)
	}
	if _, err := registry.Merge(c.Snapshot()); err != nil {
		return nil, &cliError{err: err, code: exitUsage}
	}
	return c, nil
}

// mistakesOf takes err apart.
func mistakesOf(err error) []checkMistake {
	var all file.Errors
	if errors.As(err, &all) {
		list := make([]checkMistake, len(all))
		for i, e := range all {
			list[i] = checkMistake{e.Line, e.Column, e.Msg, e.Hint}
		}
		return list
	}
	m := checkMistake{Message: err.Error()}
	if ce, ok := errors.AsType[*cliError](err); ok {
		m.Hint = ce.hint
	}
	return []checkMistake{m}
}
