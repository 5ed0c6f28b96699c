//go:build nokube

package command

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"log/slog"

	"github.com/spf13/cobra"

	"culvert.dev/internal/gateway"
	"culvert.dev/registry"
	"culvert.dev/registry/file"
	"culvert.dev/tunnel"
)

// What stands in for Kubernetes in a program without it, as that of an agent on a small
// machine.
type (
	kubeReader struct{}
	kubeReport = json.RawMessage // of another gateway, as it came
)

var errNoKube = errors.New("this program was built without Kubernetes (tag nokube)")

func checkKube(c *file.Config) error {
	if c.Kubernetes == nil {
		return nil
	}
	return usageError("remove the section kubernetes, or use a program built without that tag", "kubernetes: %w", errNoKube)
}

func logKube(*slog.Logger) {}

type kubeSources struct{}

func (s *kubeSources) use(*file.Config, *kubeReader) {}

// differs reports whether c has a section for Kubernetes, which newKube refuses.
func (s *kubeSources) differs(c *file.Config) bool { return c.Kubernetes != nil }

func (s *kubeSources) configure(*gateway.Config) {}

func (s *kubeSources) group(context.Context, *gateway.Gateway) *registry.Group {
	return &registry.Group{}
}

func newKube(c *file.Config, _ tunnel.Sockets, _ *slog.Logger) (*kubeReader, error) {
	return nil, checkKube(c)
}

// kubeStatus prints the report of a gateway that has Kubernetes, which this program can't
// read, as JSON only.
func kubeStatus(w io.Writer, s *runningStatus, asJSON bool) error {
	switch {
	case s.Kubernetes == nil:
		return &cliError{err: errors.New("the gateway has no Kubernetes configuration"), hint: "add a kubernetes section to its file", code: exitFailed}
	case !asJSON:
		return usageError("add -o json, or use a program built without that tag", "%w", errNoKube)
	}
	if err := writeJSON(w, s.Kubernetes); err != nil || s.Ready {
		return err
	}
	return errSilent
}

// newInstall refuses, as the manifests of this version are not in the program.
func newInstall() *cobra.Command {
	return &cobra.Command{
		Use:                "install",
		Short:              "Print the manifests that install culvert in Kubernetes",
		Hidden:             true,
		DisableFlagParsing: true,
		RunE: func(*cobra.Command, []string) error {
			return usageError("use a program built without that tag", "%w", errNoKube)
		},
	}
}
