package cluster

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

// Where the programs and the resources of the Gateway API are, for the child.
const (
	programsDir   = "CULVERT_CLUSTER_PROGRAMS"
	gatewayAPIDir = "CULVERT_CLUSTER_GATEWAY_API"
)

// kubernetesVersion is the version that the control plane says it is; it stands in
// controlplane/go.mod, too.
const kubernetesVersion = "v1.36.3"

// builds are the calls of go build, each in a module of the repository.
var builds = []struct {
	folder   string
	packages []string
	ldflags  string
}{
	{"integration/cluster/controlplane", []string{"."}, "-s -w" +
		" -X k8s.io/component-base/version.gitVersion=" + kubernetesVersion +
		" -X k8s.io/component-base/version.gitMajor=1 -X k8s.io/component-base/version.gitMinor=36"},
	{"integration/cluster", []string{"sigs.k8s.io/gateway-api/conformance/echo-basic", "./dns", "./inspect"}, ""},
	{"integration/deploy", []string{"./render"}, ""},
	{".", []string{"./cmd/culvert"}, "-X culvert.dev/cmd/culvert/command.version=$VERSION"},
}

// buildPrograms brings bin/cluster up to date and returns environment variables
// for the process that uses it. Nothing is linked again that has not changed.
// The flags are those of `make conformance`, so that one cache serves all.
func buildPrograms() ([]string, error) {
	root, err := repository()
	if err != nil {
		return nil, err
	}
	bin := filepath.Join(root, "bin", "cluster")
	if err := os.MkdirAll(bin, 0o755); err != nil {
		return nil, err
	}
	// The tests of several packages may start at once.
	lock, err := os.OpenFile(filepath.Join(bin, ".lock"), os.O_CREATE|os.O_RDWR, 0o644)
	if err != nil {
		return nil, err
	}
	defer lock.Close()
	if err := unix.Flock(int(lock.Fd()), unix.LOCK_EX); err != nil {
		return nil, fmt.Errorf("waiting for another build: %w", err)
	}
	if _, err := os.Stat(filepath.Join(bin, "controlplane")); err != nil {
		fmt.Fprintln(os.Stderr, "cluster: building Kubernetes "+kubernetesVersion+": minutes, if Go's cache has not seen it")
	}
	for _, b := range builds {
		ldflags := strings.ReplaceAll(b.ldflags, "$VERSION", version(root))
		args := []string{"build", "-trimpath", "-buildvcs=false", "-ldflags", ldflags, "-o", bin + "/"}
		if _, err := goCommand(filepath.Join(root, b.folder), append(args, b.packages...)...); err != nil {
			return nil, err
		}
	}
	crds, err := goCommand(filepath.Join(root, "integration/cluster"), "list", "-m", "-f", "{{.Dir}}", "sigs.k8s.io/gateway-api")
	if err != nil {
		return nil, err
	}
	return []string{programsDir + "=" + bin, gatewayAPIDir + "=" + strings.TrimSpace(crds)}, nil
}

func goCommand(dir string, args ...string) (string, error) {
	cmd := exec.Command("go", args...)
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0", "PWD="+dir)
	out, err := cmd.Output()
	if err != nil {
		var exit *exec.ExitError
		if errors.As(err, &exit) {
			err = fmt.Errorf("%w\n%s", err, exit.Stderr)
		}
		return "", fmt.Errorf("go %s: %w", strings.Join(args, " "), err)
	}
	return string(out), nil
}

// version is what make build would call this tree.
func version(root string) string {
	if v := os.Getenv("VERSION"); v != "" {
		return v
	}
	out, err := exec.Command("git", "-C", root, "describe", "--tags", "--always", "--dirty").Output()
	if err != nil {
		return "dev"
	}
	return strings.TrimSpace(string(out))
}

// repository is the folder of culvert's own go.mod: tests run in their package's.
func repository() (string, error) {
	dir, err := os.Getwd()
	if err != nil {
		return "", err
	}
	for ; dir != "/"; dir = filepath.Dir(dir) {
		mod, err := os.ReadFile(filepath.Join(dir, "go.mod"))
		if err == nil && strings.HasPrefix(string(mod), "module culvert.dev\n") {
			return dir, nil
		}
	}
	return "", errors.New("the tests don't run within culvert's repository")
}

// Program returns the path of a program that Main has built: "controlplane",
// "echo-basic", "dns", "inspect",
// "render" or "culvert". All are static.
func Program(name string) string {
	return filepath.Join(os.Getenv(programsDir), name)
}
