import java.sql.*;

/** Usage: java Query.java URL QUERY */
public class Query {
    public static void main(String[] args) throws Exception {
        try (Connection connection = DriverManager.getConnection(args[0]);
                ResultSet rows = connection.createStatement().executeQuery(args[1])) {
            while (rows.next()) {
                System.out.println(rows.getString(1));
            }
        }
    }
}
