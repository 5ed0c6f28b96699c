package command

import (
	"bufio"
	"fmt"
	"io"
	"strings"

	"github.com/spf13/cobra"
	"golang.org/x/crypto/bcrypt"

	"culvert.dev/registry"
	"culvert.dev/registry/file"
)

func newConfig() *cobra.Command {
	cmd := &cobra.Command{
		Use:     "config",
		Short:   "Check a configuration file, print its JSON schema",
		Example: "  culvert config check culvert.yaml\n  culvert config schema > culvert.schema.json",
		Args:    cobra.NoArgs,
		RunE:    func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	check := &cobra.Command{
		Use:   "check FILE",
		Short: "Check a configuration file",
		Long: `Check reads a configuration file as a gateway would and lists every mistake with
its line and column and how to mend it. The exit code is 0 for a good file, 2 for
one a gateway would refuse.`,
		Example: "  culvert config check culvert.yaml",
		Args:    args(1, "one FILE"),
		RunE: func(cmd *cobra.Command, a []string) error {
			return checkConfig(cmd.OutOrStdout(), a[0])
		},
	}
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
		return usageError("use letters and digits", "%q can't be a user's name", name)
	}
	hash, err := bcrypt.GenerateFromPassword([]byte(password), bcrypt.DefaultCost)
	if err != nil {
		return usageError("bcrypt takes 72 bytes at the most", "%w", err)
	}
	_, err = fmt.Fprintf(w, "%s:%s\n", name, hash)
	return err
}

func checkConfig(w io.Writer, path string) error {
	c, err := file.Load(path)
	if err != nil {
		return &cliError{err: err, code: exitUsage}
	}
	if _, err := gatewayConfig(c); err != nil {
		return usage(err)
	}
	if _, err := registry.Merge(c.Snapshot()); err != nil {
		return &cliError{err: err, code: exitUsage}
	}
	fmt.Fprintf(w, "%s: good: %d listeners, %d services", path, len(c.Listeners), len(c.Services))
	if c.DNS != nil {
		fmt.Fprintf(w, ", DNS at %d addresses", len(c.DNS.Listeners))
	}
	fmt.Fprintln(w)
	return nil
}
