package command

import (
	"fmt"
	"io"

	"github.com/spf13/cobra"

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
			_, err := cmd.OutOrStdout().Write(file.Schema)
			return err
		},
	}
	cmd.AddCommand(check, schema)
	return cmd
}

func checkConfig(w io.Writer, path string) error {
	c, err := file.Load(path)
	if err != nil {
		return &cliError{err: err, code: exitUsage}
	}
	if _, err := gatewayConfig(c); err != nil {
		return &cliError{err: err, code: exitUsage}
	}
	if _, err := registry.Merge(c.Snapshot()); err != nil {
		return &cliError{err: err, code: exitUsage}
	}
	fmt.Fprintf(w, "%s: good: %d listeners, %d services\n", path, len(c.Listeners), len(c.Services))
	return nil
}
